"""How a cluster is: seen, judged, shown."""
