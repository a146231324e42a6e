"""Decoders, which make columns of payloads."""
