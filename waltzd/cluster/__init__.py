"""What the coordinator holds, as values and documents; ZooKeeper and its twin in memory; which server is to own what."""
