"""The timelines of a log, in words: what commands say that show ids of a partition whose log an operator has ended."""

from __future__ import annotations

from waltzd.protocol.timelines import Timeline


def timeline_sentence(one: Timeline) -> str:
    """Who ended the log of the timeline before, when, and where."""
    how = f" by {one.cause}" if one.cause else ""
    when = f" at {one.began}" if one.began else ""
    by = f" ({one.who})" if one.who else ""
    return (
        f"timeline {one.number}: begun{how}{when}{by} in session {one.session:,}; it shares timeline {one.parent} up to id "
        f"{one.fork:,}, and what that had above was given up"
    )
