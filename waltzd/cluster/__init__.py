"""What the coordinator holds, as values and documents; ZooKeeper and its twin in memory; who is to own what."""
