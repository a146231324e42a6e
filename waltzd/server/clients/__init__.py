"""The owner towards clients: mounts, the pipeline, feeds, calls, limits."""
