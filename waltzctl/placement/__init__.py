"""Placement: plans and changes of which storages hold replicas and which servers own partitions."""
