"""Logs: what there is to read, which part of it, and bytes to columns and back."""
