"""The keeper of bytes: a passive daemon that stores replicas of partitions and does what the owner of a session says."""
