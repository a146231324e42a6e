"""The file system as a seam: the real one, and one that forgets, tears and fails."""
