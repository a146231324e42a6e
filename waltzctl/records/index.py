"""`waltzctl rebuild-index`: what was typed, and what came out. The work is `waltzd.storage.offline.reindex`."""

from __future__ import annotations

import re
import time
from typing import Annotated
from uuid import UUID

from typer import Argument, Option

from waltzctl.progress import Progress, Shown, ShownProgress
from waltzctl.records.target import resolve
from waltzctl.show import files
from waltzctl.show.forms import AnyForm, put
from waltzd.disk.real import GuestDisk
from waltzd.errors import EXIT_OK, BadArgument, Unsafe
from waltzd.storage.offline.reindex import State, rebuild
from waltzd.storage.offline.verify import Target
from waltzd.storage.offline.workers import processors

_IDS = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")


def rebuild_index(
    *,
    paths: Annotated[tuple[str, ...], Argument(metavar="PATH...")],
    jobs: Annotated[
        int | None, Option("-j", "--jobs", min=1, max=256, help="Processes to use; as many as processors by default.")
    ] = None,
    left_out: Annotated[
        tuple[str, ...],
        Option(
            "--leave-out",
            metavar="FIRST-LAST",
            help="Damaged ids that may be missing from the index. May be given several times; one partition only.",
        ),
    ] = (),
    key: Annotated[
        UUID | None, Option("--key", help="The cluster key that the data must have, where no control file says it.")
    ] = None,
    output: AnyForm = "table",
    progress: ShownProgress = Shown.AUTO,
) -> int:
    """Make the index files of a storage again from its data files. An index that is right is left alone. The old index
    stays until the new one is whole and on the disk, and a rebuild that was killed goes on when it is run again.

    The storage must not be running. Data files are never changed. Damaged records stop the rebuild of their segment
    unless their ids are named with --leave-out.

    \b
    Examples:
      waltzctl rebuild-index /var/lib/waltz
      waltzctl rebuild-index /var/lib/waltz/0 --leave-out 17-17 --jobs 2
    """
    targets = resolve(paths)
    ranges = [_id_range(text) for text in left_out]
    if ranges and not _is_one_partition(targets):
        raise BadArgument(
            "--leave-out names ids of one partition, and the paths are not one partition",
            next_step="give the partition directory, or one of its segments",
        )
    started = time.monotonic()
    with Progress("rebuild", progress) as course:
        done = rebuild(GuestDisk(), targets, jobs=jobs or processors(), left_out=ranges, key=key, on_progress=course.update)
    put(files.rebuilding(done, seconds=time.monotonic() - started), output)
    refused = done.of(State.REFUSED)
    if refused:
        first = refused[0].findings[0]
        more = f", {len(refused)} segments in all" if len(refused) > 1 else ""
        raise Unsafe(
            f"{first.path} is damaged{more}",
            not_done="the indexes of these segments were not touched; data files never are",
            next_step="rebuild the replica from the others, or name the ids with --leave-out FIRST-LAST",
        )
    return EXIT_OK


def _id_range(text: str) -> tuple[int, int]:
    given = _IDS.fullmatch(text)
    if given is None:
        raise BadArgument(f"--leave-out {text}: this is not FIRST-LAST, for example 17-17")
    first, last = int(given[1]), int(given[2])
    if first > last:
        raise BadArgument(f"--leave-out {text}: the first id is above the last")
    return first, last


def _is_one_partition(targets: list[Target]) -> bool:
    return len({target.directory for target in targets}) == 1 and bool(targets[0].directory)
