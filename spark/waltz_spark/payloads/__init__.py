"""Columns out of payloads."""
