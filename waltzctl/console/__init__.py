"""Read-only view of a cluster in a browser. It uses the functions of `waltzctl`; each page names the matching commands."""
