"""Reading of logs: origins, the selection of ids, and the conversion between records and Arrow columns."""
