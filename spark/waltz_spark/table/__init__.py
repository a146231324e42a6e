"""The log as a table of Spark: what a task reads, and how a query narrows it."""
