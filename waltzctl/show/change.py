"""Output of plans, questions and the history of changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from waltzctl.shell.safety import Effect, Margin, Plan
from waltzctl.show.forms import Column, Columns, Line, Listing, Part, Table, draw, plain, put
from waltzctl.show.terminal import ROWS_MAX, console
from waltzd.cluster.documents import HistoryEntry

HEADS = {
    "dry-run": ("would do", "bold"),
    "nothing-to-do": ("nothing to do", "bold green"),
    "impossible": ("nothing could be done", "bold red"),
    "refused": ("refused", "bold red"),
    "done": ("done", "bold green"),
}
MARGINS: Columns[Effect] = (
    Column("partition"),
    Column("can lose now", "before", cell=lambda margin: _format_margin(margin)),
    Column("can lose then", "after", cell=lambda margin: _format_margin(margin)),
)


def put_plan(found: Plan, output: str, *, result: str, **more: Any) -> None:
    """Print a plan with its result. `more` has further keys of JSON."""
    head, style = HEADS[result]
    page = [Line(f"{head}: {found.verb} {found.subject}", style), *_parts(found)]
    page += ["Nothing was changed."] if result == "dry-run" else []
    put(Listing(page=page, content={"result": result, **_document(found), **more}), output)


def put_question(found: Plan) -> None:
    """Print a plan on standard error, above the question."""
    draw(console(to_stderr=True), [Line(f"{found.verb} {found.subject}", "bold"), *_parts(found)])


def _parts(found: Plan) -> list[Part]:
    return [
        *(f"  {step}" for step in found.steps[:ROWS_MAX]),
        *([f"  and {len(found.steps) - ROWS_MAX:,} more"] if len(found.steps) > ROWS_MAX else []),
        Table(MARGINS, [step for step in found.margins if step.is_worse][:ROWS_MAX]),
        *(Line(refusal, "red") for refusal in found.refusals),
    ]


def _format_margin(margin: Margin) -> str:
    held = f"({margin.level} of {margin.members} members level)"
    return f"takes nothing {held}" if margin.spare < 0 else f"{margin.spare} {held}"


def _document(found: Plan) -> dict[str, Any]:
    def margin_json(margin: Margin) -> dict[str, int]:
        return {"members": margin.members, "level": margin.level, "spare": margin.spare}

    return {
        "verb": found.verb,
        "subject": found.subject,
        "danger": found.danger.name.lower(),
        "steps": list(found.steps),
        "refusals": found.refusals,
        "margins": [
            {"partition": step.partition, "before": margin_json(step.before), "after": margin_json(step.after)}
            for step in found.margins
        ],
    }


Numbered = tuple[int, HistoryEntry]


def history(entries: Sequence[Numbered]) -> Listing[dict[str, Any]]:
    columns: Columns[dict[str, Any]] = (
        Column("number"),
        Column("began", cell=_moment),
        Column("who"),
        Column("what", lambda entry: f"{entry['verb']} {entry['subject']}"),
        Column("outcome"),
        Column("reason"),
    )
    rows = [{"number": number, **plain(entry)} for number, entry in entries]
    return Listing(kind="history", columns=columns, rows=rows, nothing="Nothing was changed with waltzctl yet.")


def _moment(text: str) -> str:
    """Format a time as `status` and `events` do."""
    return f"{text.removesuffix('+00:00')}Z" if text.endswith("+00:00") else text
