"""What every command stands on: what was typed, which cluster is meant, the question before a change, and its end."""
