"""Files for and about daemons: configurations, units, dashboards, alert rules."""
