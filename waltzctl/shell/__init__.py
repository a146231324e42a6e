"""Common parts of all commands: options, the selected cluster, plans, confirmation, and the history."""
