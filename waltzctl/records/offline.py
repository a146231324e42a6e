"""`waltzctl verify-segments`, `rebuild-index` and `segment dump`: options and output. The work is in
`waltzd.storage.offline`.

Paths name storage directories, partition directories or segments. They are made absolute, so that duplicates are detected.
A symbolic link at the end of a path is refused: it could make one file look like two.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable
from typing import Annotated, Literal
from uuid import UUID

from typer import Argument, Option

from waltzctl.records import dump as shown
from waltzctl.shell.options import OUTPUT
from waltzctl.shell.progress import Progress, Shown, ShownProgress
from waltzctl.show import storage
from waltzctl.show.forms import AnyForm, put
from waltzd.disk.real import GuestDisk, RealDisk, translate
from waltzd.errors import EXIT_FINDINGS, EXIT_OK, BadArgument
from waltzd.errors.operations import NothingHere, NotRegularFile, Unsafe
from waltzd.format.layout import CONTROL_NAME, HARD_STATE_NAME, IDENTITY_NAME, first_id_of
from waltzd.storage.offline.dump import dump
from waltzd.storage.offline.reindex import IndexState, rebuild
from waltzd.storage.offline.verify import Options, Target, partition_of, processors, verify

_IDS = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")
Paths = Annotated[tuple[str, ...], Argument(metavar="PATH...")]
Jobs = Annotated[
    int | None, Option("-j", "--jobs", min=1, max=256, help="Number of processes; one for each processor by default.")
]


def verify_segments(
    *,
    paths: Paths,
    jobs: Jobs = None,
    read_only: Annotated[
        bool,
        Option(
            "--read-only",
            help="Check a directory that a daemon holds; the end of each log, where it may be writing, is not judged.",
        ),
    ] = False,
    deep: Annotated[
        bool, Option("--deep", help="Check each record again by itself, with plain zlib. Much slower.")
    ] = False,
    key: Annotated[UUID | None, Option("--key", help="Cluster key that the data must have.")] = None,
    output: AnyForm = "table",
    progress: ShownProgress = Shown.AUTO,
) -> int:
    """Check all files of a storage: every checksum, header and index entry, the control and hard-state files, and that no
    segment is missing. PATH is a storage directory, a partition directory, or a segment.

    Nothing is written. The exit code is 0 if all files are valid, 8 if there are findings, 1 if the check could not run.

    \b
    Examples:
      waltzctl verify-segments /var/lib/waltz
      waltzctl verify-segments /var/lib/waltz/0 /var/lib/waltz/1 -o json
      waltzctl verify-segments --read-only --jobs 1 /var/lib/waltz
    """
    targets = resolve(paths)
    options = Options(jobs=jobs or processors(), is_read_only=read_only, is_deep=deep, key=key)
    started = time.monotonic()
    with Progress("verify", progress) as course:
        report = verify(RealDisk(), targets, options, course.update)
    put(storage.report(report, seconds=time.monotonic() - started), output)
    return EXIT_FINDINGS if report.findings else EXIT_OK


def rebuild_index(
    *,
    paths: Paths,
    jobs: Jobs = None,
    left_out: Annotated[
        tuple[str, ...],
        Option(
            "--leave-out",
            metavar="FIRST-LAST",
            help="Range of damaged ids to leave out of the index, both ends included. Repeatable; one partition only.",
        ),
    ] = (),
    key: Annotated[
        UUID | None, Option("--key", help="Cluster key that the data must have, if there is no control file.")
    ] = None,
    output: AnyForm = "table",
    progress: ShownProgress = Shown.AUTO,
) -> int:
    """Rebuild the index files of a storage from its data files. A valid index is kept. The old index stays until the new
    one is complete and on disk. If a rebuild was killed, run it again: finished indexes are kept.

    The storage must not run. Data files are never changed. A damaged record stops the rebuild of its segment, unless its id
    is named with --leave-out.

    \b
    Examples:
      waltzctl rebuild-index /var/lib/waltz
      waltzctl rebuild-index /var/lib/waltz/0 --leave-out 17-17 --jobs 2
    """
    targets = resolve(paths)
    ranges = [_id_range(text) for text in left_out]
    if ranges and (len({target.directory for target in targets}) != 1 or not targets[0].directory):
        raise BadArgument(
            "--leave-out names ids of one partition, and the paths are not one partition",
            next_step="give the partition directory, or one of its segments",
        )
    started = time.monotonic()
    with Progress("rebuild", progress) as course:
        done = rebuild(GuestDisk(), targets, jobs=jobs or processors(), left_out=ranges, key=key, on_progress=course.update)
    put(storage.rebuilding(done, seconds=time.monotonic() - started), output)
    refused = done.of(IndexState.REFUSED)
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


def dump_segment(
    *,
    path: Annotated[str, Argument(metavar="PATH")],
    after: Annotated[int, Option("--after", min=-1, metavar="ID", help="Show ids after this id; -1 for all ids.")] = -1,
    through: Annotated[int | None, Option("--through", min=0, metavar="ID", help="Last id to show, inclusive.")] = None,
    output: Annotated[
        Literal["table", "json", "csv", "hex"],
        Option(
            "-o",
            "--output",
            rich_help_panel=OUTPUT,
            help="Output format: json is one object a line; hex is all bytes with their meaning.",
        ),
    ] = "table",
    payload_bytes: Annotated[
        int | None, Option("--payload-bytes", min=0, help="Maximum number of bytes of each payload to show.")
    ] = None,
) -> int:
    """Dump a segment (.seg), an index (.idx), the control file, the identity file, or a hard-state file.

    Damaged files are dumped as well. Bytes that are not a valid record are printed in their place; if one changed byte
    explains the damage, it is marked. Nothing is written.

    \b
    Examples:
      waltzctl segment dump /var/lib/waltz/0/0000000000000000000.seg
      waltzctl segment dump -o hex --after 16 --through 17 /var/lib/waltz/0/0000000000000000000.seg
      waltzctl segment dump -o json /var/lib/waltz/waltz-storage.ctl
    """
    if through is not None and through <= after:
        raise BadArgument(f"there are no ids after {after} through {through}", not_done="nothing was shown")
    sink = shown.sink(output, payload_bytes)
    dump(RealDisk(), plain_file(path), sink, first_id=after + 1, last_id=through)
    return EXIT_OK


# -- from paths to the things that they name ---------------------------------------------------------------------------


def resolve(paths: Iterable[str]) -> list[Target]:
    return [_resolve_one(path) for path in paths]


def plain_file(path: str) -> str:
    """Return the absolute path of a regular file."""
    mode = _mode_of(path)
    if stat.S_ISDIR(mode):
        raise BadArgument(f"{path} is a directory", not_done="nothing was read", next_step="name a file in it")
    _refuse_special(path, mode)
    return os.path.realpath(path)


def _mode_of(path: str) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError as error:
        raise translate(error, f"looking at {path}") from error
    except ValueError as error:
        raise BadArgument(f"{path!r} is not a path") from error


def _refuse_special(path: str, mode: int) -> None:
    if stat.S_ISLNK(mode):
        raise NotRegularFile(f"{path} is a link", next_step=f"give the real path: {os.path.realpath(path)}")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise NotRegularFile(
            f"{path} is neither a file nor a directory", next_step="give a storage directory, or a file in it"
        )


def _resolve_one(path: str) -> Target:
    mode = _mode_of(path)
    _refuse_special(path, mode)
    whole = os.path.realpath(path)
    if stat.S_ISREG(mode):
        directory, _, name = whole.rpartition("/")
        first_id = first_id_of(name)
        if first_id is None:
            raise BadArgument(
                f"{path} does not have the name of a segment or an index",
                not_done="nothing was read or changed",
                next_step="give a storage directory, a partition directory, or a file such as 0000000000000000000.seg",
            )
        return Target(storage=_storage_of(directory), directory=directory, first_id=first_id)
    names = _names(whole)
    if _is_storage(whole, names):
        return Target(storage=whole)
    if any(first_id_of(name) is not None for name in names) or HARD_STATE_NAME in names:
        return Target(storage=_storage_of(whole), directory=whole)
    raise NothingHere(
        f"{path} holds no Waltz data: no control file, no partition, no segment"
        if names
        else f"{path} is an empty directory"
    )


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError as error:
        raise translate(error, f"listing {directory}") from error


def _is_storage(directory: str, names: list[str]) -> bool:
    """Return whether a directory looks like one of a storage, which may have lost its control file."""
    if CONTROL_NAME in names or IDENTITY_NAME in names:
        return True
    for name in names:
        inner = f"{directory}/{name}"
        if partition_of(name) is None or os.path.islink(inner) or not os.path.isdir(inner):
            continue
        if any(first_id_of(inside) is not None for inside in _names(inner)):
            return True
    return False


def _storage_of(directory: str) -> str:
    """Return the storage directory of a partition directory; "" if it has none."""
    parent, _, name = directory.rpartition("/")
    names = _names(parent or "/")
    is_storage = partition_of(name) is not None and (CONTROL_NAME in names or IDENTITY_NAME in names)
    return parent if is_storage else ""
