"""How plans, questions and the history of changes look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from waltzctl.shell.safety import Effect, Margin, Plan
from waltzctl.show.forms import Column, Columns, Listing, grid, plain, put_json
from waltzctl.show.terminal import ROWS_MAX, console
from waltzd.cluster.documents import HistoryEntry

if TYPE_CHECKING:
    from rich.console import Console

HEADS = {
    "dry-run": ("would do", "bold"),
    "nothing-to-do": ("nothing to do", "bold green"),
    "impossible": ("nothing could be done", "bold red"),
    "refused": ("refused", "bold red"),
    "done": ("done", "bold green"),
}
MARGINS: Columns[Effect] = (
    Column("partition", lambda step: step.partition, is_right=True, cell=str),
    Column("can lose now", lambda step: step.before, cell=lambda margin: _spell(margin)),
    Column("can lose then", lambda step: step.after, cell=lambda margin: _spell(margin)),
)


def put_plan(found: Plan, output: str, *, result: str, **more: Any) -> None:
    """What would be done, or was. `more` is for JSON."""
    if output == "json":
        put_json({"result": result, **_document(found), **more})
        return
    out = console()
    head, style = HEADS[result]
    out.print(f"{head}: {found.verb} {found.subject}", style=style, soft_wrap=True)
    _draw(out, found)
    if result == "dry-run":
        out.print("Nothing was changed.")


def put_question(found: Plan) -> None:
    """On standard error, beside the question."""
    out = console(to_stderr=True)
    out.print(f"{found.verb} {found.subject}", style="bold", soft_wrap=True)
    _draw(out, found)


def _draw(out: Console, found: Plan) -> None:
    for step in found.steps[:ROWS_MAX]:
        out.print(f"  {step}", soft_wrap=True)
    if len(found.steps) > ROWS_MAX:
        out.print(f"  and {len(found.steps) - ROWS_MAX:,} more")
    grid(out, MARGINS, [step for step in found.margins if step.is_worse][:ROWS_MAX])
    for refusal in found.refusals:
        out.print(refusal, style="red", soft_wrap=True)


def _spell(margin: Margin) -> str:
    held = f"({margin.level} of {margin.members} members level)"
    return f"takes nothing {held}" if margin.spare < 0 else f"{margin.spare} {held}"


def _document(found: Plan) -> dict[str, Any]:
    def told(margin: Margin) -> dict[str, int]:
        return {"members": margin.members, "level": margin.level, "spare": margin.spare}

    return {
        "verb": found.verb,
        "subject": found.subject,
        "danger": found.danger.name.lower(),
        "steps": list(found.steps),
        "refusals": found.refusals,
        "margins": [
            {"partition": step.partition, "before": told(step.before), "after": told(step.after)} for step in found.margins
        ],
    }


Numbered = tuple[int, HistoryEntry]


def history(entries: Sequence[Numbered]) -> Listing[dict[str, Any]]:
    columns: Columns[dict[str, Any]] = (
        Column("number", is_right=True),
        Column("began", cell=_moment),
        Column("who"),
        Column("what", lambda entry: f"{entry['verb']} {entry['subject']}"),
        Column("outcome"),
        Column("reason"),
    )
    rows = [{"number": number, **plain(entry)} for number, entry in entries]
    return Listing(kind="history", columns=columns, rows=rows, nothing="Nothing was changed with waltzctl yet.")


def _moment(text: str) -> str:
    """As `status` and `events` write it."""
    return f"{text.removesuffix('+00:00')}Z" if text.endswith("+00:00") else text
