"""Exports: the protocol, its manifest, the files and where they lie, and the commands."""
