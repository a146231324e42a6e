"""Exports: their protocol, manifests, files and destinations, and the commands."""
