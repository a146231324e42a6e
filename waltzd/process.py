"""What a daemon says of its process, whatever it serves: its clock, its files, and the lines that it logged last. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Vitals:
    time_ms: int
    """What its clock shows, in milliseconds since 1970: nothing is decided by it."""
    open_files: int | None
    """Files, sockets and directories; None where the system does not tell."""
    open_files_max: int
    """Above this it can neither open a segment nor accept a connection."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A line of its log. A log never has payloads."""

    number: int
    """Rises by one with each line of this process."""
    time_ms: int
    level: str
    """debug, info, warning, error, critical"""
    text: str
    code: str | None
    """Of the error that it tells of."""


@dataclass(frozen=True, kw_only=True)
class Events:
    began_ms: int
    """When the process began to keep them: another one means another process, whose numbers are others."""
    events: tuple[Event, ...]
