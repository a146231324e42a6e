"""Consumer groups at work in a server: the group log is followed, and members are given what they have to do."""
