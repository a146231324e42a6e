"""Judge histories that were recorded before: `python -m tests.checker FILE-OR-FOLDER ...`, all of them as one history.

The end is 0 when it is sound, 1 when it is not, 2 when it is no history.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.checker.history import BadHistory, load
from tests.checker.verdict import judge


def files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        found = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        if not found:
            raise BadHistory(f"there is no .jsonl file in {path}")
        yield from found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="./dev judge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="a file, or a folder with files *.jsonl")
    try:
        history = load(files(parser.parse_args().paths))
    except (BadHistory, OSError) as error:
        print(f"no history: {error}", file=sys.stderr)
        return 2
    verdict = judge(history)
    print(verdict)
    return 0 if verdict.is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
