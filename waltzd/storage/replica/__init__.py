"""One replica's files: segments, promises, opening, healing. Plain code over an injected Disk."""
