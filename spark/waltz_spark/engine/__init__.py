"""Spark itself: which Java, how it starts and ends, what travels to a cluster."""
