"""Consumer groups: what members work on, and what operators do about it."""
