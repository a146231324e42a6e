"""What Waltz does, shown on a scratch directory: `./dev demo`.

Every step is a command that is printed as one would type it, then run for real, with the exit code that it must have. So
the demonstration is a test as well: it ends with 1 when a step does not do what it says.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

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


def main() -> int:
    shutil.rmtree(ROOT / SCRATCH, ignore_errors=True)
    shutil.copytree(ROOT / "tests/fixtures/java-waltz-a/storage0", ROOT / STORAGE)
    verify = ["waltzctl", "verify-segments", str(STORAGE)]
    results = [
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
