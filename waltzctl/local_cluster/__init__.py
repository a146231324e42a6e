"""A cluster on this machine: brought up, looked at, broken, removed."""
