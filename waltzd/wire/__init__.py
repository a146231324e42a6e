"""Frames and gRPC: the only room that knows messages; callers of both services; TLS."""
