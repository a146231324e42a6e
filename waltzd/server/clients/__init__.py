"""What clients meet at the owner: mounts, the pipeline, feeds, calls, limits."""
