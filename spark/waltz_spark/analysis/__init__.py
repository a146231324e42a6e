"""Reports on a log, and a replay of one."""
