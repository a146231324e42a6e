"""The documents of a cluster in ZooKeeper, their in-memory twin for tests, and the assignment of partitions to servers."""
