"""How the state of a cluster looks: the verdict first, then the reasons, then what there is. Nothing is judged here."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from waltzctl.listing import put_yaml
from waltzctl.placement.render_cluster import picture_json
from waltzctl.render import ROWS_MAX, console, count, put_json, size, table
from waltzctl.watching.verdict import SLOW_MS, Health, Reason, Verdict
from waltzd.cluster.assignment import spell_numbers

if TYPE_CHECKING:
    from rich.console import Console

    from waltzctl.picture.picture import PartitionView, ServerView, StorageView
    from waltzctl.playground.local import LocalCluster
    from waltzctl.watching.poll import Sighting
    from waltzd.errors import WaltzError

STYLES = {Health.HEALTHY: "bold green", Health.DEGRADED: "bold yellow", Health.DOWN: "bold red"}
REASONS_MAX = 20


def status(found: Sighting, cluster: LocalCluster | None, output: str) -> None:
    if output == "json":
        put_json(status_json(found, cluster))
        return
    if output == "yaml":
        put_yaml(status_json(found, cluster))
        return
    show(console(), found, cluster)


def show(out: Console, found: Sighting, cluster: LocalCluster | None) -> None:
    verdict = found.verdict
    out.print(f"{verdict.health}: {verdict.sentence}", style=STYLES[verdict.health], soft_wrap=True)
    reasons(out, verdict.reasons)
    nodes(out, found)
    rows = [_group_row(views) for views in _groups(found.picture.partitions)]
    names = ("partitions", "owner", "state", "counting", "mounts", "tail")
    table(out, names, rows[:ROWS_MAX], right=("counting", "mounts", "tail"))
    contact = "" if found.coordinator_ms is None else f", ZooKeeper answered in {found.coordinator_ms:.0f} ms"
    leader = f", leader {found.picture.leader}" if found.picture.leader is not None else ""
    out.print(f"cluster {found.picture.meta.name}{leader}{contact}, {found.at}", soft_wrap=True)
    if cluster is not None:
        from waltzctl.playground import render_local

        render_local.processes(out, cluster)


def reasons(out: Console, found: Sequence[Reason]) -> None:
    for reason in found[:REASONS_MAX]:
        style = "red" if reason.stops else "yellow"
        since = f" (seen since {reason.since})" if reason.since is not None else ""
        paragraph(out, f"- {reason.sentence}{since}", style)
        put_next(out, reason.next_step)
    if len(found) > REASONS_MAX:
        out.print(f"- and {count(len(found) - REASONS_MAX, 'more reason')}; -o json has them all")


def put_next(out: Console, step: str) -> None:
    """Not wrapped: a command in it can be copied."""
    out.print(f"  Next: {step}", soft_wrap=True)


def paragraph(out: Console, text: str, style: str) -> None:
    """Wrapped under its own beginning; words that may be copied stay whole."""
    lines = textwrap.wrap(
        text, max(20, out.width), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False,
        drop_whitespace=True,
    )  # fmt: skip
    for line in lines:
        out.print(line, style=style, soft_wrap=True)


def nodes(out: Console, found: Sighting) -> None:
    picture = found.picture
    servers = [
        (view.meta.name, view.meta.admin_listen,
         f"{len(view.said.partitions):,}" if view.said is not None else "", answer(view),
         _state(view.error, [("leader", view.meta.name == picture.leader), ("draining", _is_draining(view)),
                             ("no contact with ZooKeeper", view.said is not None and not view.said.is_connected)]))
        for view in picture.servers
    ]  # fmt: skip
    servers += [(meta.name, meta.admin_listen, "", "", "down") for meta in picture.missing]
    table(out, ("server", "admin address", "owns", "answered", "state"), servers, right=("owns", "answered"))
    storages = [
        (view.meta.name, view.meta.admin_listen, view.meta.group,
         f"{len(view.said.assigned):,}" if view.said is not None else "",
         size(view.said.free_bytes) if view.said is not None else "", answer(view),
         _state(view.error, [("stopping", view.said is not None and view.said.is_draining), *_ills(view)]))
        for view in picture.storages
    ]  # fmt: skip
    names = ("storage", "admin address", "group", "replicas", "free", "answered", "state")
    table(out, names, storages, right=("replicas", "free", "answered"))


def answer(view: ServerView | StorageView) -> str:
    if view.error is not None:
        return ""
    return f"{view.call.milliseconds:,.0f} ms{'!' if view.call.milliseconds > SLOW_MS else ''}"


def _is_draining(view: ServerView) -> bool:
    return view.said.is_draining if view.said is not None else view.meta.is_draining


def _ills(view: StorageView) -> list[tuple[str, bool]]:
    if view.said is None:
        return []
    statuses = [held.status for held in view.said.assigned]
    return [
        ("damaged", any(status is None or not status.is_sound for status in statuses)),
        ("disk full", any(status is not None and status.is_full for status in statuses)),
        ("offline", any(status is not None and not status.is_available for status in statuses)),
    ]


def _state(error: WaltzError | None, words: list[tuple[str, bool]]) -> str:
    if error is not None:
        return f"silent ({error.code})"
    return ", ".join(["up", *(word for word, holds in words if holds)])


def _groups(partitions: Sequence[PartitionView]) -> list[list[PartitionView]]:
    """Those that are alike, together; the ones with something to say first."""
    grouped: dict[tuple[object, ...], list[PartitionView]] = {}
    for view in partitions:
        key = (view.owner, view.state, view.counting, len(view.replicas))
        grouped.setdefault(key, []).append(view)
    return sorted(grouped.values(), key=lambda views: (views[0].is_open and _is_whole(views[0]), views[0].partition))


def _is_whole(view: PartitionView) -> bool:
    return view.counting >= len(view.replicas)


def _group_row(views: list[PartitionView]) -> tuple[str, ...]:
    first = views[0]
    said = [view.said for view in views if view.said is not None]
    counting = f"{first.counting} of {len(first.replicas)}" if said else ""
    mounts = f"{sum(owned.mounts for owned in said):,}" if said else ""
    tail = size(sum(owned.tail_bytes for owned in said)) if said else ""
    numbers = spell_numbers([view.partition for view in views])
    return (numbers, first.owner or "nobody", first.state, counting, mounts, tail)


# -- for scripts -------------------------------------------------------------------------------------------------------


def verdict_json(found: Verdict) -> dict[str, Any]:
    return {
        "verdict": str(found.health),
        "sentence": found.sentence,
        "reasons": [
            {
                "key": reason.key,
                "sentence": reason.sentence,
                "next_step": reason.next_step,
                "since": reason.since,
                "stops": reason.stops,
                "partitions": list(reason.partitions),
                "names": list(reason.names),
            }
            for reason in found.reasons
        ],
    }


def status_json(found: Sighting, cluster: LocalCluster | None) -> dict[str, Any]:
    picture = found.picture
    lost = found.lost
    told: dict[str, Any] = {
        **verdict_json(found.verdict),
        "at": found.at,
        "milliseconds": round(found.milliseconds, 1),
        "coordinator_milliseconds": None if found.coordinator_ms is None else round(found.coordinator_ms, 1),
        "coordinator_seen": found.at if lost is None else lost.seen,
        "error": None if lost is None else {"code": lost.cause.code, "message": lost.cause.message},
        "answered_milliseconds": {
            view.meta.name: None if view.error is not None else round(view.call.milliseconds, 1) for view in picture.nodes
        },
        "moves": {str(partition): list(names) for partition, names in sorted(picture.moves.items())},
        "cluster": picture_json(picture),
    }
    if cluster is not None:
        from waltzctl.playground import render_local

        told |= {
            "directory": str(cluster.directory),
            "daemons": render_local.processes_json(cluster),
        }
    return told


# -- again and again ---------------------------------------------------------------------------------------------------


class Screen:
    """What is shown over and over: in place on a terminal, one after the other anywhere else."""

    def __init__(self) -> None:
        from rich.live import Live

        self.out = console()
        self._live = (
            Live(console=self.out, screen=True, auto_refresh=False, vertical_overflow="crop")
            if self.out.is_terminal
            else None
        )

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with suppress(OSError):  # a terminal that went away
                self._live.stop()

    def put(self, draw: Callable[[Console], None], foot: str) -> None:
        """`draw` prints on the console that it is given."""
        from rich.text import Text

        if self._live is None:
            draw(self.out)
            self.out.print()
            return
        paper = self._paper()
        draw(paper)
        assert isinstance(paper.file, io.StringIO)
        lines = paper.file.getvalue().splitlines()
        room = max(1, self.out.height - 1)
        if len(lines) > room:
            foot = f"{count(len(lines) - room, 'more line')} below the screen. {foot}"
        drawn = Text.from_ansi("\n".join(lines[:room]), no_wrap=True, overflow="ellipsis")
        drawn.append("\n" + foot, style="dim")
        self._live.update(drawn, refresh=True)

    def _paper(self) -> Console:
        """As wide as the screen and with its colours; what is printed there is not shown yet."""
        from rich.console import Console

        return Console(
            file=io.StringIO(),
            width=self.out.width,
            height=self.out.height,
            force_terminal=True,
            no_color=self.out.no_color,
            color_system="auto" if self.out.color_system is None else self.out.color_system,  # type: ignore[arg-type]
            highlight=False,
            markup=False,
            emoji=False,
        )
