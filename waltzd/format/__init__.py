"""Bytes of the log: layout, records, checksums, indexes, and a segment read from end to end. All of it is pure."""
