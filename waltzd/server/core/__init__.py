"""The owner's decisions: recovery, locks, steps, marks. All of it is pure."""
