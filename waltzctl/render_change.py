"""How plans, questions and the history of changes look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from waltzctl.render import ROWS_MAX, console, put_json, table

if TYPE_CHECKING:
    from rich.console import Console

    from waltzctl.change import Plan
    from waltzd.cluster.documents import HistoryEntry

HEADS = {
    "dry-run": ("would do", "bold"),
    "nothing-to-do": ("nothing to do", "bold green"),
    "refused": ("refused", "bold red"),
    "done": ("done", "bold green"),
}


def plan(found: Plan, output: str, *, result: str, **more: Any) -> None:
    """What would be done, or was. `more` is for JSON."""
    if output == "json":
        put_json({"result": result, **plan_json(found), **more})
        return
    out = console()
    head, style = HEADS[result]
    out.print(f"{head}: {found.verb} {found.subject}", style=style, soft_wrap=True)
    _show(out, found)
    if result == "dry-run":
        out.print("Nothing was changed.")


def question(found: Plan) -> None:
    """On standard error, beside the question."""
    out = console(to_stderr=True)
    out.print(f"{found.verb} {found.subject}", style="bold", soft_wrap=True)
    _show(out, found)


def _show(out: Console, found: Plan) -> None:
    for step in found.steps[:ROWS_MAX]:
        out.print(f"  {step}", soft_wrap=True)
    if len(found.steps) > ROWS_MAX:
        out.print(f"  and {len(found.steps) - ROWS_MAX:,} more")
    worse = [step for step in found.margins if step.is_worse]
    rows = [(str(step.partition), _spell(step.before), _spell(step.after)) for step in worse[:ROWS_MAX]]
    table(out, ("partition", "can lose now", "can lose then"), rows, right=("partition",))
    for refusal in found.refusals:
        out.print(refusal, style="red", soft_wrap=True)


def _spell(margin: Any) -> str:
    held = f"({margin.level} of {margin.members} members level)"
    return f"takes nothing {held}" if margin.spare < 0 else f"{margin.spare} {held}"


def plan_json(found: Plan) -> dict[str, Any]:
    return {
        "verb": found.verb,
        "subject": found.subject,
        "danger": found.danger.name.lower(),
        "steps": list(found.steps),
        "refusals": found.refusals,
        "margins": [
            {
                "partition": step.partition,
                "before": {"members": step.before.members, "level": step.before.level, "spare": step.before.spare},
                "after": {"members": step.after.members, "level": step.after.level, "spare": step.after.spare},
            }
            for step in found.margins
        ],
    }


def history(entries: Sequence[tuple[int, HistoryEntry]], output: str) -> None:
    if output == "json":
        put_json({"history": [{"number": number, **vars(entry), "steps": list(entry.steps)} for number, entry in entries]})
        return
    out = console()
    rows = [
        (f"{number:,}", _moment(entry.began), entry.who, f"{entry.verb} {entry.subject}", entry.outcome, entry.reason or "")
        for number, entry in entries
    ]
    table(out, ("number", "began", "who", "what", "outcome", "reason"), rows, right=("number",))
    if not rows:
        out.print("Nobody has changed anything with waltzctl yet.")


def _moment(text: str) -> str:
    """As `status` and `events` write it."""
    return f"{text.removesuffix('+00:00')}Z" if text.endswith("+00:00") else text
