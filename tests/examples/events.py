"""What a hotel and its shop write into one log: classes, each with a name and a version by which the log knows it for ever.

All programs share this module; which ones keep a view of which events is their own business."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from waltzd.serializers import EventType, JsonEvents


@dataclass(frozen=True, kw_only=True)
class Booked:
    """A guest has a room for a night. `request`: the key of who asked."""

    request: str
    room: str
    night: str
    guest: str


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Something was delivered (a quantity above 0) or sold (below)."""

    request: str
    article: str
    quantity: int


Event: TypeAlias = Booked | Moved
EVENTS = JsonEvents[Event](EventType(Booked, "booked"), EventType(Moved, "moved"))
