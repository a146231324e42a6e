"""The health of a cluster: facts, rules that judge them, and the commands that show the result."""
