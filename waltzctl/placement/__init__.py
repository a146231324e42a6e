"""Which storages hold what, and which servers own it: planned, changed, moved."""
