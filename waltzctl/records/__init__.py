"""Commands that read, compare and check the log."""
