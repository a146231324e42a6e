"""Small SVG drawings: charts of the last minutes, and replicas as cursors relative to the committed mark. Pure.

A drawing only repeats numbers that the page has as text, and carries them in its label for screen readers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 320, 64
TOP = 4
POINTS_MAX = 120
"""Maximum number of points of a line."""
TRACK, TRACK_HEIGHT = 120, 22
MARK_X = 116
STEP = 8.0
"""Distance in units to the left for each doubling of the lag of a replica."""


@dataclass(frozen=True)
class Line:
    name: str
    values: Sequence[float | None]
    """Values over time; None if unknown at that time."""


@dataclass(frozen=True)
class Cursor:
    name: str
    behind: int
    counts: bool


def lines(times: Sequence[float], series: Sequence[Line], *, seconds: float, label: str) -> Markup:
    """Draw the last `seconds` as a chart, with the newest value at the right and 0 at the bottom. Of several values at one
    position the highest is drawn, so that no peak is lost."""
    known = [value for line in series for value in line.values if value is not None]
    high = max(known, default=0.0) or 1.0
    end = times[-1] if times else 0.0
    paths = []
    for number, line in enumerate(series):
        parts, is_open = [], False
        for at, value in thinned(times, line.values, seconds / POINTS_MAX):
            if value is None:
                is_open = False
                continue
            x = WIDTH * (1 - (end - at) / seconds)
            y = HEIGHT - (HEIGHT - TOP) * min(1.0, value / high)
            parts.append(f"{'L' if is_open else 'M'}{x:.1f} {y:.1f}")
            is_open = True
        paths.append(f'<path class="line line-{number}" d="{"".join(parts)}"/>')
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}"><path class="ground" d="M0 {HEIGHT}H{WIDTH}"/>{"".join(paths)}</svg>'
    )


def thinned(times: Sequence[float], values: Sequence[float | None], span: float) -> Iterator[tuple[float, float | None]]:
    """Yield the highest value of each span of time, every unknown value (a gap in the line), and the newest value.
    Spans begin at multiples of their length, so a drawing does not change while it moves."""
    best: tuple[float, float] | None = None
    newest = times[-1] if times else 0.0
    for at, value in zip(times, values, strict=True):
        if best is not None and (value is None or at == newest or at // span != best[0] // span):
            yield best
            best = None
        if value is None:
            yield at, None
        elif best is None or value > best[1]:
            best = at, value
    if best is not None:
        yield best


def cursors(found: Sequence[Cursor]) -> Markup:
    """Draw the replicas of a partition: the committed mark is the line at the right, and a level replica is next to it. A
    hollow cursor is a replica that does not count for the majority."""
    summary = ", ".join(f"{one.name} {f'{one.behind:,} behind' if one.behind else 'level'}" for one in found)
    drawn, radius = [], 3 if len(found) <= 3 else 2
    for place, one in enumerate(found):
        x = max(6.0, MARK_X - 4 - STEP * math.log2(1 + max(0, one.behind)))
        y = (place + 1) * TRACK_HEIGHT / (len(found) + 1)
        shape = "counts" if one.counts else "apart"
        drawn.append(
            f'<path class="rail" d="M4 {y:.1f}H{MARK_X}"/><circle class="{shape}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'
        )
    return Markup(
        f'<svg class="cursors" viewBox="0 0 {TRACK} {TRACK_HEIGHT}" width="{TRACK}" height="{TRACK_HEIGHT}" role="img" '
        f'aria-label="{escape(summary or "no replica is known")}">{"".join(drawn)}'
        f'<path class="mark" d="M{MARK_X} 0V{TRACK_HEIGHT}"/></svg>'
    )
