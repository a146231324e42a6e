"""Tools for files that no daemon holds: verify, reindex, dump, transplant."""
