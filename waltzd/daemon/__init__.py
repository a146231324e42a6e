"""What both daemons are: settings, a process, logs, metrics, readiness."""
