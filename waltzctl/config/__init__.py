"""Files for daemons: configurations explained, certificates."""
