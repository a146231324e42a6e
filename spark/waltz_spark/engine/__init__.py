"""Spark for export commands: the choice of Java, starting and ending a session, and the package sent to a cluster."""
