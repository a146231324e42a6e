"""A command that changes a cluster, from end to end: read the state, plan, ask, apply, record in the history.

`--dry-run` shows the same plan that is applied. A plan that would harm a partition is refused unless `--override` names the
subject and `--reason` is given. The history in the coordinator (`waltzctl history`) records the operator, the change and
the reason, also of a change that failed or was interrupted.

No event loop and no connection is open while the command asks: Ctrl-C must end it at once, and a person may take long to
answer. A plan carries the versions of the documents that it was made from, or is made again before it is applied, so that a
change by someone else in between is detected.
"""

from __future__ import annotations

import getpass
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import typer
from typer import Option

from waltzctl.shell import moment
from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget, check_operator, using
from waltzctl.shell.interruption import Interrupted, interruptible
from waltzctl.shell.options import CHANGE, Output, confirmed, option_group, typed
from waltzctl.shell.progress import Report, Shown, ShownProgress, Waiting
from waltzctl.shell.safety import Danger, Effect, Margin, Plan
from waltzctl.show.forms import Column, Columns, Line, Listing, Part, Table, draw, plain, put
from waltzctl.show.terminal import ROWS_MAX, console, is_line, printable
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import HistoryEntry
from waltzd.errors import EXIT_OK, BadArgument, WaltzError
from waltzd.errors.operations import ChangedMeanwhile, NotConfirmed, Unsafe
from waltzd.wire.tls import Tls

NOTHING_BEGUN = "Interrupted. Nothing was changed."
ONLY_WAITED = "Interrupted. This command changed nothing; the moves that it waited for continue."
WHOLE = "Interrupted. The change was applied completely or not at all: run the same command again to see which."
STAYS = (
    "Interrupted. Completed steps stay, and started steps may continue. Run the same command again to resume; "
    "`waltzctl history` shows the plan."
)
REASON_CHARACTERS_MAX = 1000
UNVERIFIED = "unverified: "
"""Prefix of a name in the history that is not from a certificate."""
change_option = partial(Option, rich_help_panel=CHANGE)


@option_group
@dataclass(frozen=True, kw_only=True)
class ConfirmOptions:
    """Options that confirm or explain a change."""

    is_dry: Annotated[bool, change_option("--dry-run", help="Show the plan and change nothing.")] = False
    yes: Annotated[bool, change_option("--yes", help="Answer yes, unless the change is dangerous.")] = False
    confirm: Annotated[
        str | None,
        change_option("--confirm", metavar="NAME", help="Confirm a dangerous change by its name."),
    ] = None
    reason: Annotated[
        str | None, change_option("--reason", metavar="TEXT", help="Reason for the change, kept in the history.")
    ] = None
    override: Annotated[
        str | None,
        change_option("--override", metavar="NAME", help="Apply an unsafe change, by the name of its subject."),
    ] = None
    progress: ShownProgress = Shown.AUTO

    def __post_init__(self) -> None:
        if self.reason is not None and not 0 < len(self.reason) <= REASON_CHARACTERS_MAX:
            raise BadArgument(f"--reason: between 1 and {REASON_CHARACTERS_MAX} characters")
        if self.reason is not None and not is_line(self.reason):
            raise BadArgument("--reason: it is not one line of printable UTF-8 text")


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that is planned and not yet applied."""

    plan: Plan
    do: Callable[[Cluster, Report], Awaitable[Mapping[str, Any]]]
    """Function that applies the plan and returns the result for JSON."""
    is_change: bool = True
    """False if the command only waits for others: it asks nothing, and is not recorded in the history."""
    is_recorded: bool = True
    """False if the change deletes the history together with the cluster."""
    is_planned_again: bool = False
    """True if the plan is made and checked again just before it is applied, because no document that it writes carries a
    version of what was read."""
    interrupted: str | None = None
    """Message after an interruption; None for the general one."""

    @property
    def after_interruption(self) -> str:
        if self.interrupted is not None:
            return self.interrupted
        return ONLY_WAITED if not self.is_change else STAYS if self.is_recorded else WHOLE


Prepare = Callable[[Cluster], Awaitable[Change]]


async def _nothing(_cluster: Cluster, _report: Report) -> Mapping[str, Any]:
    return {}


def nothing_to_do(verb: str, subject: str) -> Change:
    """Return a change without steps, for a command that was run before."""
    return Change(plan=Plan(verb=verb, subject=subject, steps=()), do=_nothing)


@option_group
@dataclass(frozen=True, kw_only=True)
class ChangeCommand:
    """Options of every command that changes a cluster; `perform` runs the change."""

    confirmation: ConfirmOptions
    target: CommandTarget
    output: Output = "table"

    def perform(self, prepare: Prepare) -> int:
        """Plan with `prepare`, ask, apply and print the result; return the exit code."""
        confirmation, target = self.confirmation, self.target
        if not confirmation.is_dry:
            check_operator(target.tls, "change a cluster")
        try:
            with interruptible(NOTHING_BEGUN):
                change = using(target, prepare)
                is_asked = change.is_change or confirmation.is_dry or not change.plan.steps
                if is_asked and not agree(change.plan, confirmation, target, self.output):
                    if not (confirmation.is_dry or change.plan.steps):
                        using(target, lambda cluster: close_finished(cluster, change.plan, target.tls))
                    return EXIT_OK
        except typer.Abort:  # Ctrl-C or the end of standard input at the question
            raise Interrupted(NOTHING_BEGUN) from None

        with interruptible(change.after_interruption), Waiting(confirmation.progress) as waiting:
            done = using(
                target, lambda cluster: carried_out(cluster, change, prepare, confirmation, target.tls, waiting.report)
            )
        put_plan(change.plan, self.output, result="done", **done)
        return EXIT_OK


async def carried_out(
    cluster: Cluster, change: Change, prepare: Prepare, confirmation: ConfirmOptions, tls: Tls | None, report: Report
) -> Mapping[str, Any]:
    """Apply a confirmed change, record it in the history, and return its result."""
    if not (change.is_change and change.is_recorded):
        return await change.do(cluster, report)
    async with recorded(cluster, change.plan, confirmation, tls):
        if change.is_planned_again:
            _check_again(change.plan, (await prepare(cluster)).plan, confirmation)
        return await change.do(cluster, report)


# -- whether to do it --------------------------------------------------------------------------------------------------


def agree(plan: Plan, confirmation: ConfirmOptions, target: ClusterTarget, output: str) -> bool:
    """Return whether to apply the plan; False for a dry run or a plan without steps, which is printed. Raise `Unsafe` or
    `NotConfirmed` if it is refused."""
    if plan.refusals and confirmation.override != plan.subject:
        if confirmation.is_dry:
            put_plan(plan, output, result="refused")
        raise Unsafe(
            f"{plan.verb} {plan.subject}: {'; '.join(plan.refusals)}",
            next_step=f"make the cluster healthy first, or use --override {plan.subject} and --reason TEXT",
        )
    if confirmation.is_dry or not plan.steps:
        put_plan(plan, output, result="dry-run" if plan.steps else "nothing-to-do")
        return False
    if plan.refusals and confirmation.reason is None:
        raise NotConfirmed(f"--override {plan.subject} needs --reason", next_step="give the reason with --reason TEXT")
    _confirm(plan, confirmation, target)
    return True


def _check_again(agreed: Plan, plan: Plan, confirmation: ConfirmOptions) -> None:
    """Raise `ChangedMeanwhile` if the plan became unsafe while the command waited for an answer, or needs the name of its
    subject now, and the confirmed plan did not."""
    if plan.refusals and confirmation.override != plan.subject:
        raise ChangedMeanwhile(
            f"{plan.verb} {plan.subject}: the cluster changed after the plan was made: {'; '.join(plan.refusals)}",
            not_done="nothing was changed",
        )
    is_named = plan.subject in (confirmation.confirm, confirmation.override)
    if plan.danger is Danger.TYPED and agreed.danger is not Danger.TYPED and not is_named:
        raise ChangedMeanwhile(
            f"{plan.verb} {plan.subject}: the cluster changed after the plan was made: this is more dangerous now",
            not_done="nothing was changed",
            next_step=f"see the plan with --dry-run, then say --confirm {plan.subject}",
        )


def _confirm(plan: Plan, confirmation: ConfirmOptions, target: ClusterTarget) -> None:
    wanted = plan.subject if plan.danger is Danger.TYPED else target.name if target.is_protected else None
    if plan.danger is Danger.NONE and not target.is_protected:
        return
    if (plan.subject if wanted is None else wanted) in (confirmation.confirm, confirmation.override):
        return
    if wanted is None and confirmation.yes:
        return
    if confirmation.confirm is not None:
        raise NotConfirmed(f"--confirm {confirmation.confirm}: the name to confirm is {wanted or plan.subject}")
    if not sys.stdin.isatty():
        how = "say --yes" if wanted is None else f"say --confirm {wanted}"
        raise NotConfirmed(
            f"{plan.verb} {plan.subject} needs a confirmation, and standard input is not a terminal",
            next_step=f"see the plan with --dry-run, then {how}",
        )
    put_question(plan)
    agreed = confirmed("Do this?") if wanted is None else typed(f"Type {wanted} to do this") == wanted
    if not agreed:
        raise NotConfirmed(f"{plan.verb} {plan.subject} was not confirmed")


# -- the history -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def recorded(
    cluster: Cluster, plan: Plan, confirmation: ConfirmOptions, tls: Tls | None = None
) -> AsyncIterator[None]:
    """Record the change that runs inside in the history: its start, then its outcome."""
    entry = HistoryEntry(
        began=moment.now(),
        ended=None,
        who=current_user(tls),
        verb=plan.verb,
        subject=plan.subject,
        reason=confirmation.reason,
        steps=plan.steps,
        outcome="begun",
        moves=plan.moves,
    )
    number = await cluster.begin_history(entry)
    outcome = "interrupted"
    try:
        yield
        outcome = "done"
    except WaltzError as error:
        outcome = f"{error.code} {error.message}".encode(errors="backslashreplace").decode()
        raise
    finally:
        try:
            await cluster.end_history(number, replace(entry, ended=moment.now(), outcome=outcome))
            if outcome == "done":
                await _close_resumed(cluster, number, entry)
        except WaltzError as error:  # only reported: the outcome of the change itself must reach the caller
            why = printable(f"{error.code} {error.message}")
            typer.echo(f"The outcome could not be recorded in the history, entry {number}: {why}", err=True)


async def _close_resumed(cluster: Cluster, number: int, entry: HistoryEntry) -> None:
    """Close the history entries of killed commands whose moves this command finished or cancelled. An entry of a command
    that still runs is closed as well, and overwritten by that command when it ends."""
    if not entry.moves:
        return
    left = (await cluster.moves())[0].partitions.keys()
    how = "cancelled" if entry.verb == "partition assign --cancel" else "resumed"
    for other, before in await cluster.history():
        moves = set(before.moves)
        if before.ended is None and other < number and moves & set(entry.moves) and not moves & left:
            await cluster.close_history(other, ended=moment.now(), outcome=f"{how} by entry {number}, {entry.who}")


async def close_finished(cluster: Cluster, plan: Plan, tls: Tls | None = None) -> None:
    """Close the history entries of killed runs of this command whose moves have finished since."""
    try:
        left = (await cluster.moves())[0].partitions.keys()
        for number, before in await cluster.history():
            is_same = (before.verb, before.subject) == (plan.verb, plan.subject)
            if before.ended is None and is_same and before.moves and not set(before.moves) & left:
                outcome = f"its moves had arrived when {current_user(tls)} ran it again"
                await cluster.close_history(number, ended=moment.now(), outcome=outcome)
    except WaltzError as error:  # only reported: the command itself had nothing to do, and succeeded
        why = printable(f"{error.code} {error.message}")
        typer.echo(f"The outcome of an earlier run of this command could not be recorded in the history: {why}", err=True)


def current_user(tls: Tls | None = None) -> str:
    """Return the name in the certificate; without one the unverified name of the user and host in the environment."""
    if tls is not None:
        return tls.identity.name
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # the user has no name, as in many containers
        name = f"user {os.getuid()}"
    return printable(f"{UNVERIFIED}{name}@{socket.gethostname()}")


# -- what people read of it --------------------------------------------------------------------------------------------


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
