"""The log as a Spark table: columns, filters, tasks, and positions of streams."""
