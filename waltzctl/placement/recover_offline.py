"""`waltzctl storage recover --from DIR --to DIR`, while both storages are stopped: replicas are taken from the files of one
into those of another. The work is `waltzd.storage.offline.transplant`."""

from __future__ import annotations

import os

from waltzctl.change import Asked
from waltzctl.progress import Progress
from waltzctl.show.files import transplant
from waltzctl.show.forms import put
from waltzd.disk.real import GuestDisk
from waltzd.errors import EXIT_OK, EXIT_PARTIAL, BadArgument
from waltzd.storage.offline.transplant import State, carry_out, check_apart, plan

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
    put(transplant(found, verb=VERB, is_dry=asked.is_dry), output)
    errors = [graft.error for graft in found.grafts if graft.error is not None]
    if not errors:
        return EXIT_OK
    return errors[0].exit_code if len(errors) == len(found.grafts) else EXIT_PARTIAL


def _directory(path: str) -> str:
    if "\0" in path or not path:
        raise BadArgument(f"{path!r} is no path")
    return os.path.realpath(path)
