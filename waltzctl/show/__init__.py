"""Output of commands: columns of results, declared once, and the forms in which they are printed."""
