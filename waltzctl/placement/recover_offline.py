"""`waltzctl storage recover --from DIR --to DIR`, while both storages are stopped: replicas are taken from the files of one
into those of another. The work is `waltzd.storage.offline.transplant`."""

from __future__ import annotations

import os
from typing import Any

import typer

from waltzctl import render, render_change
from waltzctl.change import Asked
from waltzctl.progress import Progress
from waltzctl.render import table
from waltzd.disk.real import GuestDisk
from waltzd.errors import EXIT_OK, EXIT_PARTIAL, BadArgument
from waltzd.storage.offline.transplant import Graft, State, Transplant, carry_out, check_apart, plan

VERB = "storage recover"


def recover_offline(source: str, target: str, chosen: list[int] | None, asked: Asked, output: str) -> int:
    disk = GuestDisk()
    source, target = _directory(source), _directory(target)
    check_apart(source, target)
    found = plan(disk, source, target, chosen)
    ready = found.of(State.READY)
    total, done = found.bytes, 0
    if ready and not asked.is_dry:
        with Progress("recover", asked.progress) as course:

            def on_bytes(count: int) -> None:
                nonlocal done
                done += count
                course.update(done, total)

            found = carry_out(disk, found, on_bytes)
    _show(found, output, is_dry=asked.is_dry)
    errors = [graft.error for graft in found.grafts if graft.error is not None]
    if not errors:
        return EXIT_OK
    return errors[0].exit_code if len(errors) == len(found.grafts) else EXIT_PARTIAL


def _directory(path: str) -> str:
    if "\0" in path or not path:
        raise BadArgument(f"{path!r} is no path")
    return os.path.realpath(path)


_WORDS = {
    "ready": "can be taken",
    "taken": "taken",
    "there": "left as it is: it is there",
    "nothing": "nothing committed",
    "damaged": "damaged in the source",
}


def _show(found: Transplant, output: str, *, is_dry: bool) -> None:
    taken = found.of(State.TAKEN)
    is_damaged = any(graft.error is not None for graft in found.grafts)
    result = "dry-run" if is_dry else "done" if taken else "refused" if is_damaged else "nothing-to-do"
    if output == "json":
        render.put_json(
            {
                "result": result,
                "verb": VERB,
                "from": found.source,
                "to": found.target,
                "cluster_key": str(found.header.key),
                "is_new": found.is_new,
                "partitions": [_graft_json(graft) for graft in found.grafts],
            }
        )
        return
    out = render.console()
    head, style = render_change.HEADS[result]
    out.print(f"{head}: {VERB} --from {found.source} --to {found.target}", style=style, soft_wrap=True)
    rows = [
        (
            str(graft.partition),
            _WORDS[graft.state],
            f"0 to {graft.last_id:,}" if graft.state in ("ready", "taken") else "",
            render.size(graft.origin.bytes) if graft.state in ("ready", "taken") else "",
        )
        for graft in found.grafts
    ]
    table(out, ("partition", "state", "ids", "size"), rows, right=("partition", "size"))
    for graft in found.grafts:
        if graft.set_aside is not None:
            out.print(f"partition {graft.partition}: what was there is in {graft.set_aside}", soft_wrap=True)
        elif graft.replaces and graft.state == "ready":
            out.print(f"partition {graft.partition}: what is there will be set aside; {graft.replaces}", soft_wrap=True)
        for line in graft.error.lines() if graft.error is not None else []:
            typer.echo(f"partition {graft.partition}: {line}", err=True)
    if is_dry:
        out.print("Nothing was changed. Records are proven while they are copied.")
    elif taken:
        out.print("Start the storage: the owners of its partitions copy what came since, and its replicas count again.")


def _graft_json(graft: Graft) -> dict[str, Any]:
    is_known = graft.state in ("ready", "taken")
    return {
        "partition": graft.partition,
        "state": str(graft.state),
        "last_id": graft.last_id if is_known else None,
        "segments": graft.segments if is_known else None,
        "bytes": graft.origin.bytes if is_known else None,
        "replaces": graft.replaces or None,
        "set_aside": graft.set_aside,
        "error": None if graft.error is None else render.error_json(graft.error),
    }
