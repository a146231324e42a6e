"""The cluster in a browser: what `waltzctl` sees, by the same functions, each page with the command that says the same."""
