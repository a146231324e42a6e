"""`waltzctl bench`: how fast a cluster commits transactions and feeds them."""
