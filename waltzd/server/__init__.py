"""The owner of partitions: checks locks, gives ids, writes to a quorum of storages, feeds clients."""
