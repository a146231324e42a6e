"""Changes by a browser: the plans of the tool's own commands, agreed to by typing a name, carried out and kept in the
history as those of a terminal are.

A command is called as the tool calls it, with a request that keeps what it prepares instead of carrying it out. What is
shown is planned once more before it is done: a plan that came out otherwise meanwhile is shown again. What is refused as
unsafe stays refused here; to override it is for a terminal.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

from waltzctl.console.groups import ALL
from waltzctl.console.pages import Asked, Page, Part, grids
from waltzctl.console.table import Look, grid, tone_of
from waltzctl.groups import parked, position
from waltzctl.placement import ownership, partition
from waltzctl.placement.moving import MoveOptions
from waltzctl.shell.change import Asked as Agreed
from waltzctl.shell.change import Change, Prepare, Request, agree, carried_out
from waltzctl.shell.progress import Amount
from waltzctl.shell.reach import Reach, unknown
from waltzctl.shell.safety import Danger, Plan
from waltzctl.show.change import MARGINS
from waltzctl.show.forms import Column
from waltzctl.watching import client
from waltzd.cluster.cluster import Cluster
from waltzd.errors import EXIT_OK, BadArgument, ConsoleOnlyLooks, NotConfirmed, WaltzError
from waltzd.format.layout import ID_MAX

WORKS_MAX = 50
"""Changes that are remembered here; the history has them all."""
VALUE_CHARACTERS_MAX = 200
WAIT_SECONDS = 60.0
NOT_PLANNED = "nothing was planned"


@dataclass(frozen=True, kw_only=True)
class Planning(Request):
    """Keeps what a command prepares."""

    kept: list[Prepare] = field(default_factory=list)

    def perform(self, prepare: Prepare) -> int:
        self.kept.append(prepare)
        return EXIT_OK


@dataclass(frozen=True, kw_only=True)
class Verb:
    words: str
    """As it is typed."""
    needs: tuple[str, ...]
    """What has to be said."""
    call: Callable[[Mapping[str, str], Request], int]
    typed: Callable[[Mapping[str, str]], list[str]]
    """The words behind the verb."""


def _parked_meant(given: Mapping[str, str]) -> dict[str, Any]:
    is_all = given["ids"] == ALL
    return {"is_all": is_all, "ids": None if is_all else given["ids"]}


def _parked_typed(given: Mapping[str, str]) -> list[str]:
    return ["--all" if given["ids"] == ALL else given["ids"]]


def _whole(given: Mapping[str, str], name: str) -> int:
    text = given[name]
    if not (text.isascii() and text.isdecimal() and int(text) <= ID_MAX):
        raise BadArgument(f"{name}: {text!r} is no whole number", not_done=NOT_PLANNED)
    return int(text)


_MOVE = MoveOptions(timeout=WAIT_SECONDS)
VERBS = {
    "server-drain": Verb(
        words="server drain", needs=("server",), typed=lambda given: [given["server"]],
        call=lambda given, request: ownership.drain(server=given["server"], request=request),
    ),
    "server-undrain": Verb(
        words="server undrain", needs=("server",), typed=lambda given: [given["server"]],
        call=lambda given, request: ownership.undrain(server=given["server"], request=request),
    ),
    "partition-transfer": Verb(
        words="partition transfer", needs=("partitions", "to"),
        typed=lambda given: [given["partitions"], "--to", given["to"]],
        call=lambda given, request: ownership.transfer(partitions=given["partitions"], server=given["to"], request=request),
    ),
    "moves-cancel": Verb(
        words="moves cancel", needs=("partitions",), typed=lambda given: [given["partitions"]],
        call=lambda given, request: partition.moves_cancel(numbers=given["partitions"], options=_MOVE, request=request),
    ),
    "client-disconnect": Verb(
        words="client disconnect", needs=("name",), typed=lambda given: [given["name"]],
        call=lambda given, request: client.disconnect(subject=given["name"], request=request),
    ),
    "group-parked-replay": Verb(
        words="group parked replay", needs=("name", "ids"), typed=lambda given: [given["name"], *_parked_typed(given)],
        call=lambda given, request: parked.replay(name=given["name"], request=request, **_parked_meant(given)),
    ),
    "group-parked-discard": Verb(
        words="group parked replay", needs=("name", "ids"),
        typed=lambda given: [given["name"], *_parked_typed(given), "--discard"],
        call=lambda given, request: parked.replay(
            name=given["name"], is_discard=True, request=request, **_parked_meant(given)
        ),
    ),
    "group-resume": Verb(
        words="group resume", needs=("name",), typed=lambda given: [given["name"]],
        call=lambda given, request: position.resume(name=given["name"], request=request),
    ),
    "group-skip": Verb(
        words="group reset", needs=("name", "partition", "to"),
        typed=lambda given: [given["name"], "--partitions", given["partition"], "--skip-to", given["to"]],
        call=lambda given, request: position.reset(
            name=given["name"], numbers=str(_whole(given, "partition")), skipped=str(_whole(given, "to")), request=request
        ),
    ),
}  # fmt: skip


def prepared(verb: Verb, given: Mapping[str, str], reach: Reach) -> Prepare:
    request = Planning(asked=Agreed(), reach=reach)
    verb.call(given, request)
    return request.kept[0]


# -- under way ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Work:
    """One change, from the moment at which a name was typed."""

    number: int
    plan: Plan
    began: str
    says: str = "it begins"
    outcome: str = "begun"
    task: asyncio.Task[None] | None = None


WORKS = (
    Column[Work]("number", lambda work: work.number, is_right=True),
    Column[Work]("began", lambda work: work.began),
    Column[Work]("what", lambda work: f"{work.plan.verb} {work.plan.subject}"),
    Column[Work]("outcome", lambda work: work.outcome),
    Column[Work]("says", lambda work: work.says),
)


class Works:
    """What was begun by this console. When it ends, what is under way ends as by Ctrl-C."""

    def __init__(self) -> None:
        self.all: list[Work] = []
        self._number = 0

    def begin(self, cluster: Cluster, change: Change, prepare: Prepare, agreed: Agreed, reach: Reach) -> Work:
        self._number += 1
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        work = Work(number=self._number, plan=change.plan, began=now)

        def say(sentence: str, amount: Amount | None = None, /) -> None:
            work.says = sentence if amount is None else f"{amount.percent} %; {sentence}"

        async def run() -> None:
            try:
                await carried_out(cluster, change, prepare, agreed, reach.tls, say)
            except WaltzError as error:
                work.outcome, work.says = f"{error.code}", " ".join(error.lines())
            except asyncio.CancelledError:
                work.outcome = "interrupted"
                raise
            else:
                work.outcome, work.says = "done", ""

        work.task = asyncio.create_task(run())
        self.all.append(work)
        over = [one for one in self.all if one.task is not None and one.task.done()]
        for one in over[: max(0, len(self.all) - WORKS_MAX)]:
            self.all.remove(one)
        return work

    async def end(self) -> None:
        tasks = [work.task for work in self.all if work.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# -- pages -------------------------------------------------------------------------------------------------------------


def check_allowed(asked: Asked) -> None:
    if not asked.allows_changes:
        raise ConsoleOnlyLooks("this console was started to look only")
    asked.check_operator("change a cluster")


def verb_of(asked: Asked) -> tuple[Verb, dict[str, str]]:
    verb = VERBS.get(asked.name)
    if verb is None:
        raise unknown("change", asked.name, VERBS)
    given = {name: asked.query.get(name, "").strip() for name in verb.needs}
    for name, value in given.items():
        if not 0 < len(value) <= VALUE_CHARACTERS_MAX or not value.isprintable() or value.startswith("-"):
            raise BadArgument(
                f"{verb.words}: {name} is missing, or cannot be {value[:40]!r}", not_done="nothing was planned"
            )
    return verb, given


def name_of(plan: Plan, reach: Reach) -> str:
    """What has to be typed: the name of what is touched, or of a protected cluster where the tool asks for that one."""
    return reach.name if reach.is_protected and plan.danger is not Danger.TYPED else plan.subject


def mark_of(plan: Plan) -> str:
    """The same for plans that say the same."""
    return hashlib.sha256(repr((plan.verb, plan.subject, plan.steps, plan.refusals)).encode()).hexdigest()


async def plan_page(asked: Asked, *, error: WaltzError | None = None) -> Page:
    """What would be done, and the form that does it."""
    check_allowed(asked)
    verb, given = verb_of(asked)
    change = await prepared(verb, given, asked.reach)(await asked.cluster())
    plan = change.plan
    worse = [one for one in plan.margins if one.is_worse]
    return Page(
        title=f"{plan.verb} {plan.subject}",
        commands=(asked.command(*verb.words.split(), *verb.typed(given), "--dry-run"),),
        looks=0,
        parts=(
            Part(name="plan", template="plan.html", given={
                "plan": plan, "margins": grid("What may fail", MARGINS, worse), "refusals": plan.refusals, "error": error,
                "has_margins": bool(worse), "wanted": name_of(plan, asked.reach), "mark": mark_of(plan), "given": given,
                "action": f"/change/{asked.name}", "is_harm": plan.danger is Danger.TYPED,
            }),
        ),
    )  # fmt: skip


def reason_of(asked: Asked) -> str | None:
    """Why, and which person's browser it was: the history names whom the console acts for."""
    who = f"by {asked.browser.name} in the console" if asked.browser is not None else ""
    return "; ".join(filter(None, [asked.query.get("reason", "").strip(), who])) or None


async def begin(asked: Asked, works: Works) -> Work | Page:
    """With what a form says: the work, or the page that says why not."""
    check_allowed(asked)
    verb, given = verb_of(asked)
    prepare = prepared(verb, given, asked.reach)
    cluster = await asked.cluster()
    change = await prepare(cluster)
    try:
        if asked.query.get("mark") != mark_of(change.plan):
            raise NotConfirmed(
                "the plan has changed since it was shown", next_step="look at the new one, and type the name once more"
            )
        wanted = name_of(change.plan, asked.reach)
        if asked.query.get("confirm", "").strip() != wanted:
            raise NotConfirmed(f"the name that was typed is not {wanted}", next_step="type what the form asks for")
        agreed = Agreed(confirm=wanted, reason=reason_of(asked))
        if not change.plan.steps or not agree(change.plan, agreed, asked.reach, "json"):
            raise NotConfirmed("there is nothing to do", next_step="look at the cluster: it is so already")
    except (NotConfirmed, BadArgument) as error:
        return await plan_page(asked, error=error)
    return works.begin(cluster, change, prepare, agreed, asked.reach)


def changes_page(works: Works) -> Callable[[Asked], Any]:
    async def changes(asked: Asked) -> Page:
        check_allowed(asked)
        rows = sorted(works.all, key=lambda work: -work.number)
        look = Look(tones={"outcome": lambda outcome: tone_of("error" if outcome.startswith("W") else outcome)})
        found = grid(
            "Changes by this console", cast("Any", WORKS), rows, look, nothing="Nothing was changed by this console."
        )
        return Page(title="Changes", commands=(asked.command("history"),), parts=(grids("changes", found),))

    return changes
