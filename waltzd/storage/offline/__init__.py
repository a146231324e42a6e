"""Offline tools for storage directories: verify, rebuild indexes, dump."""
