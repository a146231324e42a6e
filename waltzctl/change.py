"""How every command that changes a cluster goes about it: say what will be done, ask, do it, write down that it was done.

The plan that `--dry-run` shows is the very value that is carried out. What would harm a partition is refused, unless the
danger is named: `--override` with the name of what is touched, and a reason. Who changed what and why is kept in the
coordinator (`waltzctl history`), also of changes that failed or never came to their end.
"""

from __future__ import annotations

import functools
import getpass
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import click

from waltzctl import render_change
from waltzctl.progress import Shown, shown_progress
from waltzctl.reach import Reach
from waltzctl.render import is_line, printable
from waltzctl.safety import Danger, Step, refusals
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import HistoryEntry
from waltzd.errors import BadArgument, ChangedMeanwhile, NotConfirmed, Unsafe, WaltzError

REASON_CHARACTERS_MAX = 1000


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the person said beside the change itself."""

    is_dry: bool
    yes: bool
    confirm: str | None
    reason: str | None
    override: str | None
    progress: Shown = Shown.AUTO


@dataclass(frozen=True, kw_only=True)
class Plan:
    verb: str
    """As it is typed: `storage remove`."""
    subject: str
    """The name of what is touched, and what has to be typed when it is dangerous."""
    steps: tuple[str, ...]
    """What will be done, in order; nothing means that all is as it should be already."""
    margins: tuple[Step, ...] = ()
    danger: Danger = Danger.ASK
    unsafe: tuple[str, ...] = ()
    """Reasons against it that margins do not show."""

    @property
    def refusals(self) -> list[str]:
        return [*self.unsafe, *refusals(self.margins)]


def changing(command: Callable[..., int]) -> Callable[..., int]:
    """The command gets `asked`."""

    @functools.wraps(command)
    def with_asked(
        *,
        dry_run: bool,
        yes: bool,
        confirm: str | None,
        reason: str | None,
        override: str | None,
        progress: str,
        **rest: Any,
    ) -> int:
        if reason is not None and not 0 < len(reason) <= REASON_CHARACTERS_MAX:
            raise BadArgument(f"--reason: between 1 and {REASON_CHARACTERS_MAX} characters")
        if reason is not None and not is_line(reason):
            raise BadArgument("--reason: it has characters that cannot be shown on one line, or is not UTF-8")
        asked = Asked(is_dry=dry_run, yes=yes, confirm=confirm, reason=reason, override=override, progress=Shown(progress))
        return command(asked=asked, **rest)

    with_option: Callable[..., int] = with_asked
    for option in (
        shown_progress,
        click.option("--override", metavar="NAME", help="Do what is unsafe all the same: the name of what is touched."),
        click.option("--reason", metavar="TEXT", help="Why; kept in the history."),
        click.option("--confirm", metavar="NAME", help="What would have to be typed where it is dangerous."),
        click.option("--yes", is_flag=True, help="Answer a simple question with yes."),
        click.option("--dry-run", is_flag=True, help="Show the plan and change nothing."),
    ):
        with_option = option(with_option)
    return with_option


def agree(plan: Plan, asked: Asked, reach: Reach, output: str) -> bool:
    """Whether to do it. False: nothing is to be done, and that has been said. Raises when it is refused."""
    if plan.refusals and asked.override != plan.subject:
        if asked.is_dry:
            render_change.plan(plan, output, result="refused")
        raise _unsafe(plan)
    if asked.is_dry or not plan.steps:
        render_change.plan(plan, output, result="dry-run" if plan.steps else "nothing-to-do")
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
    render_change.question(plan)
    if wanted is None:
        agreed = click.confirm("Do this?", err=True)
    else:
        agreed = click.prompt(f"Type {wanted} to do this", default="", show_default=False, err=True) == wanted
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
            click.echo(f"How it ended is not in the history, entry {number}: {why}", err=True)


def who() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in many containers
        name = f"user {os.getuid()}"
    return printable(f"{name}@{socket.gethostname()}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
