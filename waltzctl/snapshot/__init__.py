"""A cluster as one value, and how it is made."""
