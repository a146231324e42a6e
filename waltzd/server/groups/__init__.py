"""Consumer groups: which transactions of a partition the members of a group still have to do. Decisions only."""
