"""How every command that changes a cluster goes about it: say what will be done, ask, do it, write down that it was done.

The plan that `--dry-run` shows is the very value that is carried out. What would harm a partition is refused, unless the
danger is named: `--override` with the name of what is touched, and a reason. Who changed what and why is kept in the
coordinator (`waltzctl history`), also of changes that failed or never came to their end.
"""

from __future__ import annotations

import getpass
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated

import typer
from typer import Option

from waltzctl.options import CHANGE, From, confirmed, typed
from waltzctl.progress import Shown, ShownProgress
from waltzctl.reach import Reach
from waltzctl.safety import Danger, Plan
from waltzctl.show.change import put_plan, put_question
from waltzctl.show.terminal import is_line, printable
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import HistoryEntry
from waltzd.errors import BadArgument, ChangedMeanwhile, NotConfirmed, Unsafe, WaltzError

REASON_CHARACTERS_MAX = 1000
changing = partial(Option, rich_help_panel=CHANGE)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the person said beside the change itself."""

    is_dry: Annotated[bool, changing("--dry-run", help="Show the plan and change nothing.")] = False
    yes: Annotated[bool, changing("--yes", help="Answer a simple question with yes.")] = False
    confirm: Annotated[
        str | None, changing("--confirm", metavar="NAME", help="What would have to be typed where it is dangerous.")
    ] = None
    reason: Annotated[str | None, changing("--reason", metavar="TEXT", help="Why; kept in the history.")] = None
    override: Annotated[
        str | None,
        changing("--override", metavar="NAME", help="Do what is unsafe all the same: the name of what is touched."),
    ] = None
    progress: ShownProgress = Shown.AUTO

    def __post_init__(self) -> None:
        if self.reason is not None and not 0 < len(self.reason) <= REASON_CHARACTERS_MAX:
            raise BadArgument(f"--reason: between 1 and {REASON_CHARACTERS_MAX} characters")
        if self.reason is not None and not is_line(self.reason):
            raise BadArgument("--reason: it has characters that cannot be shown on one line, or is not UTF-8")


Asking = Annotated[Asked, From(Asked)]


def agree(plan: Plan, asked: Asked, reach: Reach, output: str) -> bool:
    """Whether to do it. False: nothing is to be done, and that has been said. Raises when it is refused."""
    if plan.refusals and asked.override != plan.subject:
        if asked.is_dry:
            put_plan(plan, output, result="refused")
        raise _unsafe(plan)
    if asked.is_dry or not plan.steps:
        put_plan(plan, output, result="dry-run" if plan.steps else "nothing-to-do")
        return False
    if plan.refusals and asked.reason is None:
        raise NotConfirmed(f"--override {plan.subject} needs --reason", next_step="say why with --reason TEXT")
    _confirm(plan, asked, reach, output)
    return True


def check_again(plan: Plan, asked: Asked) -> None:
    """Just before it is done: a question may have been answered late, and somebody else may have been faster."""
    if plan.refusals and asked.override != plan.subject:
        raise ChangedMeanwhile(
            f"{plan.verb} {plan.subject}: this has changed since it was planned: {'; '.join(plan.refusals)}",
            not_done="nothing was changed",
        )


def _unsafe(plan: Plan) -> Unsafe:
    return Unsafe(
        f"{plan.verb} {plan.subject}: {'; '.join(plan.refusals)}",
        next_step=f"make the cluster well first, or override it with --override {plan.subject} and --reason TEXT",
    )


def _confirm(plan: Plan, asked: Asked, reach: Reach, output: str) -> None:
    wanted = plan.subject if plan.danger is Danger.TYPED else reach.name if reach.is_protected else None
    if plan.danger is Danger.NONE and not reach.is_protected:
        return
    if (plan.subject if wanted is None else wanted) in (asked.confirm, asked.override):
        return
    if wanted is None and asked.yes:
        return
    if asked.confirm is not None:
        raise NotConfirmed(f"--confirm {asked.confirm}: what is touched is {wanted or plan.subject}")
    if not sys.stdin.isatty():
        how = "say --yes" if wanted is None else f"say --confirm {wanted}"
        raise NotConfirmed(
            f"{plan.verb} {plan.subject} has to be agreed to, and standard input is no terminal",
            next_step=f"look at it with --dry-run, then {how}",
        )
    put_question(plan)
    if wanted is None:
        agreed = confirmed("Do this?")
    else:
        agreed = typed(f"Type {wanted} to do this") == wanted
    if not agreed:
        raise NotConfirmed(f"{plan.verb} {plan.subject} was not agreed to")


@asynccontextmanager
async def recorded(cluster: Cluster, plan: Plan, asked: Asked) -> AsyncIterator[None]:
    """Around the change itself."""
    entry = HistoryEntry(
        began=_now(),
        ended=None,
        who=who(),
        verb=plan.verb,
        subject=plan.subject,
        reason=asked.reason,
        steps=plan.steps,
        outcome="begun",
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
        except WaltzError as error:  # what became of the change itself is not hidden by this
            why = printable(f"{error.code} {error.message}")
            typer.echo(f"How it ended is not in the history, entry {number}: {why}", err=True)


def who() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in many containers
        name = f"user {os.getuid()}"
    return printable(f"{name}@{socket.gethostname()}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
