"""The parts that both daemons share: settings, process, logs, audit log, metrics, readiness."""
