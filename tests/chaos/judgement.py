"""What is true at the end: the checker's verdict on the history, sound files on every replica, and the same bytes in all.

All functions return what is wrong, as sentences; nothing when nothing is.
"""

from __future__ import annotations

import asyncio
import time
from hashlib import blake2b
from pathlib import Path

from tests.chaos.load import Load
from tests.chaos.plan import DAEMONS, STORAGES
from tests.chaos.world import PARTITIONS, World
from waltzctl.records.offline import resolve
from waltzd.archive.local import LocalStore
from waltzd.archive.manifest import Entry
from waltzd.archive.verification import check_piece, survey
from waltzd.disk.real import RealDisk
from waltzd.errors import WaltzError
from waltzd.errors.operations import ForeignArchive
from waltzd.format.finding import Code
from waltzd.format.layout import HEADER_BYTES, segment_name
from waltzd.storage.offline.verify import Options, verify

LINES_TOLD = 12
LOOKS, LOOKS_MAX = 4, 40
"""Looks at the cluster within the patience, and until it is over even for replicas that are still copied."""
ONE_OF_TWO = {Code.CONTROL_STRUCT, Code.HARD_STATE_SLOT}


async def healthy(world: World, load: Load) -> list[str]:
    """Mend everything, and see every partition go on."""
    try:
        await _heal(world)
    except (AssertionError, WaltzError, TimeoutError) as error:
        load.is_lost = True
        return [f"the cluster does not become whole again: {error!r}\n{await who_does_what(world, load)}"]
    if not await load.progress(world.patience / 2):
        load.is_lost = True
        hang = f"nothing is committed in some partition for {world.patience / 2:g} s after everything was healed"
        return [f"{hang}\n{await who_does_what(world, load)}"]
    return []


async def _heal(world: World) -> None:
    """Wait until the cluster is whole. A replica that is copied may take longer than the patience while it gets further:
    how long that is depends on the machine."""
    healing = asyncio.create_task(world.heal(LOOKS_MAX / LOOKS * world.patience))
    before, quiet = dict[tuple[int, str], int](), 0
    try:
        for _ in range(LOOKS_MAX):
            await asyncio.wait([healing], timeout=world.patience / LOOKS)
            if healing.done():
                return await healing
            now = await _behind(world)
            quiet = 0 if any(before.get(replica, last_id) < last_id for replica, last_id in now.items()) else quiet + 1
            if quiet == LOOKS:
                break
            before = now
        raise TimeoutError
    finally:
        healing.cancel()
        await asyncio.gather(healing, return_exceptions=True)


async def _behind(world: World) -> dict[tuple[int, str], int]:
    """Return the last ids of the replicas that do not count, as far as their owners answer."""
    try:
        found = await world.cluster.local.snapshot()
    except WaltzError:
        return {}
    owned = [view.reported for view in found.partitions if view.reported is not None]
    return {
        (one.partition, replica.storage): replica.durable_id
        for one in owned
        for replica in one.replicas
        if not replica.counts
    }


async def who_does_what(world: World, load: Load) -> str:
    lines = [f"committed: {load.counts}; unavailable: {dict(load.unavailable)}; unknown: {load.unknown}"]
    now = time.monotonic()
    waiting = sorted(((now - since, who) for who, since in load.pending.items()), reverse=True)
    lines += [f"{who} waits for {seconds:.1f} s" for seconds, who in waiting[:5]]
    try:
        found = await world.cluster.local.snapshot()
    except WaltzError as error:
        lines.append(f"no picture: {error}")
    else:
        for view in found.partitions:
            replicas = view.reported.replicas if view.reported is not None else ()
            lines.append(f"partition {view.partition}: owner {view.owner}, {view.waiting or 'open'}")
            lines += [f"    {replica}" for replica in replicas]
        lines += [f"{name} is silent: {error}" for name, error in found.silent.items()]
    for name in DAEMONS:
        daemon = world.cluster.local.daemons[name]
        lines.append(f"{name}: {'runs' if daemon.is_running else 'does not run'}; its log ends with")
        lines += [f"    {line}" for line in daemon.words().splitlines()[-LINES_TOLD:]]
    return "\n".join(lines)


async def sound(world: World, load: Load) -> tuple[str, list[str]]:
    """The checker's verdict in one sentence, and what is wrong. The load has ended, and everything is healed."""
    problems = [f"a client: {error}" for error in load.broken]
    verdict = await load.verdict(world.cluster.storage_addresses, world.cluster.key)
    if not verdict.is_sound:
        problems.append(str(verdict))
    for partition in PARTITIONS:
        try:
            await world.cluster.equal(partition)
        except (AssertionError, TimeoutError) as error:
            problems.append(f"partition {partition}: replicas do not become equal: {error!r}")
    return str(verdict).splitlines()[0], [*problems, *world.deaths, *tracebacks(world)]


def tracebacks(world: World) -> list[str]:
    """A daemon that did not foresee something says so in its log."""
    found = []
    for name in DAEMONS:
        log = world.folder / "cluster" / "log" / f"{name}.log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        at = next((number for number, line in enumerate(lines) if line.startswith("Traceback ")), None)
        if at is not None:
            found.append("\n".join([f"{name} logged a traceback:", *lines[max(0, at - 2) : at + 30]]))
    return found


async def same_files(world: World) -> list[str]:
    """Of a cluster that is stopped in order here: then every log ends where all storages know it to be committed."""
    problems = [f"{name} had to be killed" for name in await asyncio.to_thread(world.cluster.local.stop)]
    for name in STORAGES:
        problems += await asyncio.to_thread(_verify, world, name)
    for partition in PARTITIONS:
        folders = [world.storage_directory(name) / str(partition) for name in STORAGES]
        digests = [await asyncio.to_thread(_digest, folder) for folder in folders]
        if len(set(digests)) > 1:
            told = "; ".join(
                f"{name} {size} bytes {digest}" for name, (size, digest) in zip(STORAGES, digests, strict=True)
            )
            problems.append(f"partition {partition} is not the same on all storages: {told}")
    told, wrong = await asyncio.to_thread(archived, world)
    print(f"      {told}", flush=True)
    return problems + wrong


def archived(world: World) -> tuple[str, list[str]]:
    """The archive of a cluster that is stopped, in one sentence: as `waltzctl archive verify` looks at it, and held against
    the files of the storages."""
    store = LocalStore(str(world.archive))
    try:
        found = survey(store)
    except ForeignArchive:
        return "nothing was archived", []
    problems = [f"the archive: {flaw.name} {flaw.detail}" for flaw in found.flaws]
    pieces = [(partition, piece) for partition, own in found.pieces.items() for piece in own]
    for partition, piece in pieces:
        flaw = check_piece(store, found.label, partition, piece, is_quick=False)
        if flaw is not None:
            problems.append(f"the archive: {flaw.name} {flaw.detail}")
        elif not _is_log(world, partition, piece):
            problems.append(f"the archive: {piece.name(partition)} is not what any storage has")
    total = {partition: len(own) for partition, own in found.pieces.items()}
    return (
        f"archived segments by partition: {total}, orphans: {len(found.orphans)}, pending: {len(found.pending)}",
        problems,
    )


def _is_log(world: World, partition: int, piece: Entry) -> bool:
    """In format 0 replicas may have other segments than the one that uploaded, and each has its own date in the header."""
    records = (world.archive / piece.name(partition)).read_bytes()[HEADER_BYTES : piece.size - piece.index_bytes]
    files = [world.storage_directory(name) / str(partition) / segment_name(piece.first) for name in STORAGES]
    held = [path.read_bytes()[HEADER_BYTES:][: len(records)] for path in files if path.is_file()]
    return not held or records in held


def _verify(world: World, name: str) -> list[str]:
    """As `waltzctl verify-segments` does it. Where a bit of a small file was flipped, one of its two copies may be bad."""
    try:
        report = verify(RealDisk(), resolve([str(world.storage_directory(name))]), Options(key=world.cluster.key))
    except WaltzError as error:
        return [f"verify-segments on {name}: {error}"]
    excused = ONE_OF_TWO if name in world.flipped else set()
    return [f"verify-segments on {name}: {found.sentence()}" for found in report.findings if found.code not in excused]


def _digest(folder: Path) -> tuple[int, str]:
    """Of all records of a replica, wherever its segments begin."""
    size, digest = 0, blake2b(digest_size=12)
    for path in sorted(folder.glob("*.seg")):
        with path.open("rb") as file:
            file.seek(HEADER_BYTES)
            while block := file.read(1 << 20):
                size += len(block)
                digest.update(block)
    return size, digest.hexdigest()
