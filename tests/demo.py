"""What Waltz does, shown on a scratch directory: `./dev demo`.

Every step is a command that is printed as one would type it, then run for real, with the exit code that it must have. So
the demonstration is a test as well: it ends with 1 when a step does not do what it says.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.process.daemon import PARTITIONS, Daemon
from waltzd import storages
from waltzd.errors import CannotConnect
from waltzd.record import encode_payloads

ROOT = Path(__file__).parents[1]
SCRATCH = Path(".local/demo")
STORAGE = SCRATCH / "storage"
SEGMENT = STORAGE / "0" / "0000000000000000190.seg"
INDEX = SEGMENT.with_suffix(".idx")
DAMAGED_ID, DAMAGED_BYTE = 196, 1_350


@dataclass(frozen=True)
class Step:
    """A sentence, something that happens without a command, a command, and how the command must end."""

    says: str
    command: list[str]
    exit_code: int = 0


def change_byte(path: Path, offset: int, mask: int) -> None:
    raw = bytearray((ROOT / path).read_bytes())
    raw[offset] ^= mask
    (ROOT / path).write_bytes(raw)


def run(step: Step) -> bool:
    print(f"\n# {step.says}\n$ {' '.join(step.command)}", flush=True)
    program = Path(sys.executable).parent / step.command[0]
    done = subprocess.run([program, *step.command[1:]], cwd=ROOT, check=False)
    print(f"(exit code {done.returncode})", flush=True)
    if done.returncode != step.exit_code:
        print(f"This step should have ended with {step.exit_code}.", file=sys.stderr)
    return done.returncode == step.exit_code


# -- a storage, killed in the middle of its work


async def append_until_killed(daemon: Daemon) -> int:
    """Appends as fast as the storage takes them, kills it after two hundred marks, returns the last one."""
    acknowledged = -1
    async with daemon.replicas() as replicas:
        await replicas.open(0, 1, partitions=PARTITIONS)
        await replicas.set_low_mark(0, 1, -1)
        stream = replicas.append(0, 1)

        async def send() -> None:
            for first_id in range(0, 10_000_000, 50):
                await stream.send(
                    encode_payloads(first_id, [f"transaction {first_id + i}".encode() for i in range(50)]), -1
                )

        sending = asyncio.create_task(send())
        try:
            for _ in range(200):
                mark = await stream.receive()
                assert mark is not None
                acknowledged = mark
            daemon.kill()
            await sending
        except CannotConnect:
            return acknowledged
    raise AssertionError("the storage was killed and nobody noticed")


async def count_what_is_there(daemon: Daemon) -> int:
    async with daemon.replicas() as replicas:
        status = await replicas.open(0, 2, partitions=PARTITIONS)
        assert status.is_sound
        expected = 0
        async for found in replicas.read(0, 0, session=2):
            for number in range(len(found)):
                record = found.record(number)
                assert (record.id, record.payload) == (expected, f"transaction {expected}".encode())
                expected += 1
        return expected


def show_storage() -> bool:
    daemon = Daemon(ROOT / SCRATCH / "node")
    print("\n# A storage daemon, with one partition.\n$ waltzd storage --config .local/demo/node/storage.yml &", flush=True)
    with daemon:
        created = ["waltzctl", "storage", "create-partition", daemon.admin_listen, "0"]
        if not run(Step("Partitions are made by an operator.", created)):
            return False
        print("\n# Records are appended over gRPC, in frames of 50, and the daemon is killed with SIGKILL.", flush=True)
        acknowledged = storages.run(append_until_killed(daemon))
        print(f"acknowledged before the kill: ids 0 to {acknowledged:,}")
    with daemon:
        found = storages.run(count_what_is_there(daemon))
        print(
            f"after the restart, all checked: ids 0 to {found - 1:,}; lost: {max(0, acknowledged + 1 - found)}", flush=True
        )
        described = run(Step("The daemon about itself.", ["waltzctl", "storage", "describe", daemon.admin_listen]))
        daemon.stop()
    verify = ["waltzctl", "verify-segments", str(SCRATCH / "node" / "data")]
    return described and found > acknowledged and run(Step("And its files, once it has stopped.", verify))


def main() -> int:
    shutil.rmtree(ROOT / SCRATCH, ignore_errors=True)
    results = [show_storage()]
    shutil.copytree(ROOT / "tests/fixtures/java-waltz-a/storage0", ROOT / STORAGE)
    verify = ["waltzctl", "verify-segments", str(STORAGE)]
    results += [
        run(Step("A storage directory that the original Waltz wrote, in Java. Every record is checked.", verify)),
    ]
    change_byte(SEGMENT, DAMAGED_BYTE, 0x01)
    dump = ["waltzctl", "segment", "dump", str(SEGMENT), "--from", str(DAMAGED_ID - 1), "--to", str(DAMAGED_ID + 1)]
    results += [
        run(Step("One bit of one byte is changed. It is found, with its record and its place.", verify, 8)),
        run(Step("The same place, taken apart for a person to read.", dump)),
    ]
    change_byte(SEGMENT, DAMAGED_BYTE, 0x01)
    change_byte(INDEX, 1_000, 0x01)
    rebuild = ["waltzctl", "rebuild-index", str(STORAGE)]
    results += [
        run(Step("The bit is put right, and a byte of an index is changed instead: only the way to the data.", verify, 8)),
        run(Step("An index can always be made again from the data. Sound ones are left alone.", rebuild)),
        run(Step("All is well again.", verify)),
    ]
    print(f"\nThe directory is {STORAGE}: look around, damage something, and run the commands again.")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
