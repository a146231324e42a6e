"""The words that client, server and storage share, and each conversation as its other side sees it. All of it is pure."""
