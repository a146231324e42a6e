"""Bugs of the kind that a tired colleague makes, as they stand in `edits.txt`: for each what the product does wrong then,
the module and the function, the lines that go and those that come, and what catches it.

What catches it are tests of its room, or drawn seeds of the simulator. One that neither catches is a hole in the proof.
"""

from __future__ import annotations

from pathlib import Path

from tests.simulation.edit import Edit


def _read(text: str) -> dict[str, Edit]:
    """Entries stand apart by an empty line; a line that begins with # is for people."""
    found: dict[str, Edit] = {}
    for entry in text.split("\n\n"):
        lines = [line for line in entry.splitlines() if not line.startswith("#")]
        if not lines:
            continue
        name, where, *rest = lines
        marked = {mark: [line[1:] for line in rest if line[0] == mark] for mark in "-+"}
        by = [line.removeprefix("by ") for line in rest if line.startswith("by ")]
        assert where.startswith("in "), f"{name}: in which module?"
        assert len(rest) == len(marked["-"]) + len(marked["+"]) + len(by), f"{name}: a line that means nothing"
        assert name not in found, f"there are two edits that {name}"
        found[name] = Edit(
            name=name,
            module=where.split()[1],
            scope="".join(where.split()[2:]),
            old="".join(line + "\n" for line in marked["-"]),
            new="".join(line + "\n" for line in marked["+"]),
            tests=tuple(one for one in by if not one.startswith("seed ")),
            seeds=tuple(int(one.removeprefix("seed ")) for one in by if one.startswith("seed ")),
        )
    return found


EDITS = _read(Path(__file__).with_name("edits.txt").read_text(encoding="utf-8"))
