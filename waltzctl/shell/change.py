"""A change of a cluster from end to end: look, plan, ask, do, write down.

The plan that `--dry-run` shows is the very value that is carried out. What would harm a partition is refused, unless the
danger is named: `--override` with the name of what is touched, and a reason. Who changed what and why is kept in the
coordinator (`waltzctl history`), also of changes that failed or never came to their end.

The question stands between two loops and two connections: Ctrl-C at it must end the command, and a person may think for
long. What was planned carries the versions that it was planned from, or is planned again, so that a cluster which changed
meanwhile is noticed.
"""

from __future__ import annotations

import getpass
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

import typer
from typer import Option

from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget, check_operator, using
from waltzctl.shell.interruption import Interrupted, interruptible
from waltzctl.shell.options import CHANGE, Output, confirmed, option_group, typed
from waltzctl.shell.progress import Say, Shown, ShownProgress, Waiting
from waltzctl.shell.safety import Danger, Plan
from waltzctl.show.change import put_plan, put_question
from waltzctl.show.terminal import is_line, printable
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import HistoryEntry
from waltzd.errors import EXIT_OK, BadArgument, ChangedMeanwhile, NotConfirmed, Unsafe, WaltzError
from waltzd.wire.tls import Tls

NOTHING_BEGUN = "Interrupted. Nothing was changed."
ONLY_WAITED = "Interrupted. This command changed nothing; what it waited for goes on without it."
WHOLE = "Interrupted. It was done as a whole or not at all: run the same command again to see which."
STAYS = (
    "Interrupted. What was done until now stays, and what was begun may go on. Run the same command again to go on from "
    "there; `waltzctl history` says what was planned."
)
REASON_CHARACTERS_MAX = 1000
UNVERIFIED = "unverified: "
"""In front of a name in the history that no certificate says."""
change_option = partial(Option, rich_help_panel=CHANGE)


@option_group
@dataclass(frozen=True, kw_only=True)
class ConfirmOptions:
    """The options with which a person agrees to a change, or explains it."""

    is_dry: Annotated[bool, change_option("--dry-run", help="Show the plan and change nothing.")] = False
    yes: Annotated[bool, change_option("--yes", help="Answer a simple question with yes.")] = False
    confirm: Annotated[
        str | None,
        change_option("--confirm", metavar="NAME", help="The name that is asked for where a change is dangerous."),
    ] = None
    reason: Annotated[str | None, change_option("--reason", metavar="TEXT", help="Why; kept in the history.")] = None
    override: Annotated[
        str | None,
        change_option("--override", metavar="NAME", help="Do it although it is unsafe: the name of what it changes."),
    ] = None
    progress: ShownProgress = Shown.AUTO

    def __post_init__(self) -> None:
        if self.reason is not None and not 0 < len(self.reason) <= REASON_CHARACTERS_MAX:
            raise BadArgument(f"--reason: between 1 and {REASON_CHARACTERS_MAX} characters")
        if self.reason is not None and not is_line(self.reason):
            raise BadArgument("--reason: it has characters that cannot be shown on one line, or is not UTF-8")


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a command is going to do: the plan that is shown, and the function that carries it out."""

    plan: Plan
    do: Callable[[Cluster, Say], Awaitable[Mapping[str, Any]]]
    """Returns what came of it, for JSON."""
    is_change: bool = True
    """False where it only waits for what others do: then there is no question and no entry in the history."""
    is_recorded: bool = True
    """False where the history goes together with the cluster."""
    is_planned_again: bool = False
    """Plan again right before it is done: nothing that is saved carries a version of what was seen."""
    interrupted: str | None = None
    """What to say when it is interrupted, in place of the general sentence."""

    @property
    def after_interruption(self) -> str:
        if self.interrupted is not None:
            return self.interrupted
        return ONLY_WAITED if not self.is_change else STAYS if self.is_recorded else WHOLE


Prepare = Callable[[Cluster], Awaitable[Change]]


async def _nothing(_cluster: Cluster, _say: Say) -> Mapping[str, Any]:
    return {}


def nothing_to_do(verb: str, subject: str) -> Change:
    """For a command that was done before."""
    return Change(plan=Plan(verb=verb, subject=subject, steps=()), do=_nothing)


@option_group
@dataclass(frozen=True, kw_only=True)
class ChangeCommand:
    """The options of every command that changes a cluster, and how it goes about it."""

    confirmation: ConfirmOptions
    target: CommandTarget
    output: Output = "table"

    def perform(self, prepare: Prepare) -> int:
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
        except typer.Abort:  # also at the question, where it is the end of what is typed, too
            raise Interrupted(NOTHING_BEGUN) from None

        with interruptible(change.after_interruption), Waiting(confirmation.progress) as waiting:
            done = using(
                target, lambda cluster: carried_out(cluster, change, prepare, confirmation, target.tls, waiting.say)
            )
        put_plan(change.plan, self.output, result="done", **done)
        return EXIT_OK


async def carried_out(
    cluster: Cluster, change: Change, prepare: Prepare, confirmation: ConfirmOptions, tls: Tls | None, say: Say
) -> Mapping[str, Any]:
    """What was agreed to, and what came of it; written down in the history."""
    if not (change.is_change and change.is_recorded):
        return await change.do(cluster, say)
    async with recorded(cluster, change.plan, confirmation, tls):
        if change.is_planned_again:
            _check_again((await prepare(cluster)).plan, confirmation)
        return await change.do(cluster, say)


# -- whether to do it --------------------------------------------------------------------------------------------------


def agree(plan: Plan, confirmation: ConfirmOptions, target: ClusterTarget, output: str) -> bool:
    """Whether to do it. False: nothing is to be done, and that has been said. Raises when it is refused."""
    if plan.refusals and confirmation.override != plan.subject:
        if confirmation.is_dry:
            put_plan(plan, output, result="refused")
        raise Unsafe(
            f"{plan.verb} {plan.subject}: {'; '.join(plan.refusals)}",
            next_step=f"make the cluster well first, or override it with --override {plan.subject} and --reason TEXT",
        )
    if confirmation.is_dry or not plan.steps:
        put_plan(plan, output, result="dry-run" if plan.steps else "nothing-to-do")
        return False
    if plan.refusals and confirmation.reason is None:
        raise NotConfirmed(f"--override {plan.subject} needs --reason", next_step="say why with --reason TEXT")
    _confirm(plan, confirmation, target)
    return True


def _check_again(plan: Plan, confirmation: ConfirmOptions) -> None:
    """The question may have been answered late, and another operator may have been faster."""
    if plan.refusals and confirmation.override != plan.subject:
        raise ChangedMeanwhile(
            f"{plan.verb} {plan.subject}: this has changed since it was planned: {'; '.join(plan.refusals)}",
            not_done="nothing was changed",
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
        raise NotConfirmed(f"--confirm {confirmation.confirm}: what is touched is {wanted or plan.subject}")
    if not sys.stdin.isatty():
        how = "say --yes" if wanted is None else f"say --confirm {wanted}"
        raise NotConfirmed(
            f"{plan.verb} {plan.subject} has to be agreed to, and standard input is no terminal",
            next_step=f"look at it with --dry-run, then {how}",
        )
    put_question(plan)
    agreed = confirmed("Do this?") if wanted is None else typed(f"Type {wanted} to do this") == wanted
    if not agreed:
        raise NotConfirmed(f"{plan.verb} {plan.subject} was not agreed to")


# -- the history -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def recorded(
    cluster: Cluster, plan: Plan, confirmation: ConfirmOptions, tls: Tls | None = None
) -> AsyncIterator[None]:
    """Keeps the change that runs inside in the history: that it began, and how it ended."""
    entry = HistoryEntry(
        began=_now(),
        ended=None,
        who=who(tls),
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
            await cluster.end_history(number, replace(entry, ended=_now(), outcome=outcome))
            if outcome == "done":
                await _close_resumed(cluster, number, entry)
        except WaltzError as error:  # what became of the change itself is not hidden by this
            why = printable(f"{error.code} {error.message}")
            typer.echo(f"How it ended is not in the history, entry {number}: {why}", err=True)


async def _close_resumed(cluster: Cluster, number: int, entry: HistoryEntry) -> None:
    """Close the entries of killed commands whose moves are over, with the command that finished or cancelled them. One that
    still runs writes its own end later."""
    if not entry.moves:
        return
    left = (await cluster.moves())[0].partitions.keys()
    how = "cancelled" if entry.verb == "partition assign --cancel" else "resumed"
    for other, before in await cluster.history():
        moves = set(before.moves)
        if before.ended is None and other < number and moves & set(entry.moves) and not moves & left:
            await cluster.close_history(other, ended=_now(), outcome=f"{how} by entry {number}, {entry.who}")


async def close_finished(cluster: Cluster, plan: Plan, tls: Tls | None = None) -> None:
    """Close the entries of this command that was killed, where it is run again and its moves have arrived meanwhile."""
    try:
        left = (await cluster.moves())[0].partitions.keys()
        for number, before in await cluster.history():
            is_same = (before.verb, before.subject) == (plan.verb, plan.subject)
            if before.ended is None and is_same and before.moves and not set(before.moves) & left:
                outcome = f"its moves had arrived when {who(tls)} ran it again"
                await cluster.close_history(number, ended=_now(), outcome=outcome)
    except WaltzError as error:  # nothing was to be done, and that has been said
        why = printable(f"{error.code} {error.message}")
        typer.echo(f"How an earlier run of this command ended is not in the history: {why}", err=True)


def who(tls: Tls | None = None) -> str:
    """The name in the certificate. Without one, what the environment says, which any person may choose."""
    if tls is not None:
        return tls.identity.name
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in many containers
        name = f"user {os.getuid()}"
    return printable(f"{UNVERIFIED}{name}@{socket.gethostname()}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
