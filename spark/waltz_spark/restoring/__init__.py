"""Segments again, out of a lossless export."""
