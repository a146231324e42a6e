"""What is in the log: read, compared, checked."""
