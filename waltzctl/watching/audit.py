"""`waltzctl audit`: who asked the daemons of a cluster for what, and was refused what; and whether a file that says so is
whole.

Daemons tell their newest lines themselves; the files on their machines have more. A file is checked where it is, and
without any daemon: its lines are chained, and a head that was told before proves the lines in front of it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from waltzctl.shell.reach import Meant, Reach, check_operator, unknown
from waltzctl.show import watching
from waltzctl.show.forms import AnyForm, put
from waltzctl.watching.events import Listening, duration
from waltzctl.watching.poll import CALL_SECONDS, Poll
from waltzd.client import loop
from waltzd.disk.real import translate
from waltzd.errors import EXIT_FINDINGS, EXIT_OK, EXIT_PARTIAL, BadArgument, PathMissing, WaltzError
from waltzd.protocol.audit import AuditLine, Break, Chain

_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Told:
    """A line, and the daemon that tells it."""

    daemon: str
    line: AuditLine


def list_(
    *,
    who: Annotated[
        str | None, Option("--who", metavar="NAME", help="Only of these callers: a name, with * for anything.")
    ] = None,
    since: Annotated[str, Option("--since", metavar="TIME", help="How far back: 90s, 10m, 2h, 1d.")] = "1d",
    refused: Annotated[bool, Option("--refused", help="Only what was refused.")] = False,
    names: Annotated[
        tuple[str, ...], Option("--daemon", metavar="NAME", help="Only of this server or storage. Once for each.")
    ] = (),
    output: AnyForm = "table",
    reach: Meant,
) -> int:
    """Who asked the daemons of a cluster for what lately, and whether it was done or refused, in the order of time. The
    names are those of certificates. A daemon keeps its last 500 lines of people, and of servers and applications, in
    memory; its audit file has more. JSON has the head of each file beside them. The end is 7 when a daemon did not answer.

    \b
    Examples:
      waltzctl audit list
      waltzctl audit list --refused --since 7d
      waltzctl audit list --who "ann*" -o json
    """
    check_operator(reach.tls, "read audit logs")
    since_ms = int((time.time() - duration(since)) * 1000)
    told, heads, silent = loop.run(_ask(reach, names))
    put(watching.audit(chosen(told, who=who, since_ms=since_ms, is_refused=refused), heads), output)
    watching.silent(silent)
    return EXIT_PARTIAL if silent else EXIT_OK


async def _ask(reach: Reach, names: Sequence[str]) -> tuple[list[Told], dict[str, str], dict[str, WaltzError]]:
    async with Poll(reach) as poll:
        found = (await poll.look()).picture
        there = [view.meta.name for view in found.nodes]
        for name in names:
            if name not in there:
                raise unknown("daemon", name, there, not_done="no daemon was asked for its audit log")
        async with Listening(found.meta.key, reach.tls, seconds=CALL_SECONDS) as listening:
            told = await listening.audit(found, names)
            lines = [Told(daemon=name, line=line) for (_, name), said in told.items() for line in said.lines]
            return lines, {name: said.head for (_, name), said in told.items()}, dict(listening.silent)


def chosen(told: Iterable[Told], *, who: str | None, since_ms: int, is_refused: bool) -> list[Told]:
    return sorted(
        (
            one
            for one in told
            if one.line.time_ms >= since_ms
            and (not is_refused or one.line.code is not None)
            and (who is None or fnmatchcase(one.line.who.rpartition("/")[2], who) or one.line.who == who)
        ),
        key=lambda one: (one.line.time_ms, one.daemon, one.line.number),
    )


# -- a file ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Verdict:
    chain: Chain
    breaks: tuple[Break, ...]
    head: str | None
    """That was told before."""

    @property
    def is_well(self) -> bool:
        return not self.breaks and (self.head is None or self.head in self.chain.heads)


def verify(
    *,
    file: Annotated[Path, Argument(metavar="FILE", dir_okay=False)],
    head: Annotated[
        str | None, Option("--head", metavar="HASH", help="A head that the daemon told before: it has to be in the file.")
    ] = None,
    output: AnyForm = "table",
) -> int:
    """Check the audit file of a daemon, with the older ones beside it (FILE.1, FILE.2 and so on): each line carries a hash
    of itself and of the line before it. Lines that were changed, taken out or put in are named. That the newest lines were
    cut off, or that all were written anew, only a head shows that was kept elsewhere: JSON of `waltzctl audit list` has
    it, and the daemon's log. The end is 0 when the chain holds, 8 when it does not. Nothing is written.

    \b
    Examples:
      waltzctl audit verify /var/lib/waltz/audit.log
      waltzctl audit verify /var/lib/waltz/audit.log -o json
    """
    if head is not None and not _HASH.fullmatch(head):
        raise BadArgument(f"--head {head}: a head has 64 hexadecimal digits", not_done="nothing was checked")
    verdict = examined(file, head)
    put(watching.chain(verdict.chain, verdict.breaks, head, is_well=verdict.is_well), output)
    return EXIT_OK if verdict.is_well else EXIT_FINDINGS


def examined(file: Path, head: str | None) -> Verdict:
    chain, breaks = Chain(), list[Break]()
    for part in _parts(file):
        try:
            with part.open(encoding="utf-8", errors="replace", newline="\n") as lines:
                # The daemon may be in the middle of the newest line.
                whole = (line for line in lines if part != file or line.endswith("\n"))
                breaks += chain.follow(str(part), (line.rstrip("\n") for line in whole))
        except OSError as error:
            raise translate(error, f"reading {part}") from error
    return Verdict(chain=chain, breaks=tuple(breaks), head=head)


def _parts(file: Path) -> list[Path]:
    """Oldest first. The newest may not be there yet, right behind a rotation."""
    older = re.compile(re.escape(file.name) + r"\.([1-9][0-9]*)")
    try:
        found = [(int(match[1]), name) for name in os.listdir(file.parent) if (match := older.fullmatch(name))]
    except OSError as error:
        raise translate(error, f"reading {file.parent}") from error
    parts = [file.parent / name for _, name in sorted(found, reverse=True)] + ([file] if file.exists() else [])
    if not parts:
        raise PathMissing(f"there is no {file}", not_done="nothing was checked")
    return parts
