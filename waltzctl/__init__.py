"""The operator's tool. `waltzctl.main` is the door; heavy imports wait until a command needs them."""
