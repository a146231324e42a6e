"""How the checks of the doctor look: what is wrong first, what is well in short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from waltzctl.render import console, put_json, table
from waltzctl.watching.diagnosis import Check, Grade
from waltzctl.watching.render_status import paragraph, put_next

STYLES = {Grade.PASS: "green", Grade.WARN: "yellow", Grade.FAIL: "bold red", Grade.UNKNOWN: "yellow"}
ORDER = (Grade.FAIL, Grade.WARN, Grade.UNKNOWN, Grade.PASS)


def checks(found: Sequence[Check], output: str) -> None:
    if output == "json":
        put_json(checks_json(found))
        return
    out = console()
    counted = Counter(check.grade for check in found)
    worst = next(grade for grade in ORDER if counted[grade])
    out.print(", ".join(f"{counted[grade]} {grade}" for grade in ORDER if counted[grade]), style=STYLES[worst])
    for check in sorted(found, key=lambda check: ORDER.index(check.grade)):
        if check.grade is Grade.PASS:
            continue
        out.print()
        paragraph(out, f"{check.grade} {check.name}: {check.finding}", STYLES[check.grade])
        if check.fix:
            put_next(out, check.fix)
    table(out, ("passed", "found"), [(check.name, check.finding) for check in found if check.grade is Grade.PASS])


def checks_json(found: Sequence[Check]) -> dict[str, Any]:
    return {
        "result": next(grade.value for grade in ORDER if any(check.grade is grade for check in found)),
        "checks": [
            {"name": check.name, "grade": check.grade.value, "finding": check.finding, "fix": check.fix} for check in found
        ],
    }
