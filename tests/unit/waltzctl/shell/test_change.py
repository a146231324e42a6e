"""A change, from the plan to the history: who is asked what, what is refused, and what is written down of it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.process.certificates import Authority
from waltzctl.shell.change import Change, ConfirmOptions, agree, carried_out, close_finished, history, recorded
from waltzctl.shell.cluster_target import ClusterTarget
from waltzctl.shell.options import command_of
from waltzctl.shell.progress import unreported
from waltzctl.shell.safety import Danger, Effect, Margin, Plan
from waltzctl.show.forms import put
from waltzd.cluster.cluster import HISTORY, NO_VERSION, Cluster
from waltzd.cluster.coordinator import Delete
from waltzd.cluster.documents import ClusterMeta, HistoryEntry, Moves
from waltzd.cluster.memory import MemoryTree
from waltzd.errors import BadArgument, CannotConnect
from waltzd.errors.operations import ChangedMeanwhile, NodeMissing, NotConfirmed, Unsafe
from waltzd.protocol.role import Role

META = ClusterMeta(name="test", key=UUID(int=7), partitions=4, created="2026-01-01")
HERE = ClusterTarget(hosts="zk:1", root="/waltz", tls=None, name="payments", is_protected=False, origins={})
PROTECTED = replace(HERE, is_protected=True)
NOTHING = ConfirmOptions(is_dry=False, yes=False, confirm=None, reason=None, override=None)
YES = replace(NOTHING, yes=True)
PLAN = Plan(verb="storage remove", subject="s1", steps=("move 0 from s1 to s2",))
TYPED = replace(PLAN, danger=Danger.TYPED)
WORSE = Effect(before=Margin(partition=3, members=3, level=2), after=Margin(partition=3, members=3, level=1))
HARMFUL = replace(PLAN, margins=(WORSE,), danger=Danger.TYPED)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


Typing = Callable[[str], None]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Typing:
    """Somebody sits there, and types this."""
    return lambda text: monkeypatch.setattr("sys.stdin", Terminal(text))


# -- whether to do it --------------------------------------------------------------------------------------------------


def test_dry_it_shows_the_plan_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for plan in (PLAN, TYPED):
        assert not agree(plan, replace(NOTHING, is_dry=True), PROTECTED, "table")
        said = capsys.readouterr()
        assert said.out == "would do: storage remove s1\n  move 0 from s1 to s2\nNothing was changed.\n"
        assert said.err == ""
    assert not agree(PLAN, replace(YES, is_dry=True), HERE, "json")
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["result"], found["steps"]) == (1, "dry-run", ["move 0 from s1 to s2"])


def test_nothing_to_do_is_no_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert not agree(replace(PLAN, steps=()), NOTHING, PROTECTED, "table")
    assert capsys.readouterr().out == "nothing to do: storage remove s1\n"


def test_what_can_lose_nothing_is_not_asked() -> None:
    assert agree(replace(PLAN, danger=Danger.NONE), NOTHING, HERE, "table")
    with pytest.raises(NotConfirmed):
        agree(replace(PLAN, danger=Danger.NONE), NOTHING, PROTECTED, "table")


@pytest.mark.parametrize(
    ("plan", "confirmation", "target"),
    [
        (PLAN, YES, HERE),
        (PLAN, replace(NOTHING, confirm="s1"), HERE),
        (TYPED, replace(NOTHING, confirm="s1"), HERE),
        (PLAN, replace(NOTHING, confirm="payments"), PROTECTED),
        (HARMFUL, replace(NOTHING, override="s1", reason="it burns"), HERE),
        (replace(PLAN, unsafe=("no",)), replace(NOTHING, override="s1", reason="it burns"), HERE),
    ],
)
def test_what_was_said_beforehand_is_not_asked(plan: Plan, confirmation: ConfirmOptions, target: ClusterTarget) -> None:
    assert agree(plan, confirmation, target, "table")


@pytest.mark.parametrize(
    ("plan", "confirmation", "target", "next_step"),
    [
        (PLAN, NOTHING, HERE, "see the plan with --dry-run, then say --yes"),
        (TYPED, YES, HERE, "see the plan with --dry-run, then say --confirm s1"),
        (PLAN, YES, PROTECTED, "see the plan with --dry-run, then say --confirm payments"),
    ],
)
def test_without_a_terminal_it_has_to_be_said(
    plan: Plan, confirmation: ConfirmOptions, target: ClusterTarget, next_step: str
) -> None:
    with pytest.raises(NotConfirmed, match="standard input is not a terminal") as refused:
        agree(plan, confirmation, target, "table")
    assert (refused.value.exit_code, refused.value.detail_next_step) == (2, next_step)


@pytest.mark.parametrize(
    ("plan", "target", "wanted"), [(PLAN, HERE, "s1"), (TYPED, HERE, "s1"), (PLAN, PROTECTED, "payments")]
)
def test_another_name_is_no_agreement(plan: Plan, target: ClusterTarget, wanted: str, typed: Typing) -> None:
    typed("y\n")
    with pytest.raises(NotConfirmed, match=f"--confirm s2: the name to confirm is {wanted}"):
        agree(plan, replace(NOTHING, confirm="s2"), target, "table")


@pytest.mark.parametrize(
    ("plan", "target", "answer", "is_agreed"),
    [
        (PLAN, HERE, "y", True),
        (PLAN, HERE, "n", False),
        (PLAN, HERE, "", False),
        (TYPED, HERE, "s1", True),
        (TYPED, HERE, "s2", False),
        (TYPED, HERE, "y", False),
        (PLAN, PROTECTED, "payments", True),
        (PLAN, PROTECTED, "s1", False),
    ],
)
def test_somebody_is_asked(
    plan: Plan, target: ClusterTarget, answer: str, is_agreed: bool, typed: Typing, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(f"{answer}\n")
    if is_agreed:
        assert agree(plan, NOTHING, target, "json")
    else:
        with pytest.raises(NotConfirmed, match="was not confirmed"):
            agree(plan, NOTHING, target, "json")
    said = capsys.readouterr()
    assert said.out == "", "data is on standard output, and there is none yet"
    assert "storage remove s1\n  move 0 from s1 to s2\n" in said.err


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "confirmation", [NOTHING, YES, replace(NOTHING, confirm="s1"), replace(NOTHING, override="s2", reason="x")]
)
def test_what_would_stop_a_partition_is_refused(confirmation: ConfirmOptions) -> None:
    with pytest.raises(Unsafe, match="partition 3 would have 1 of 3 members level and take no transactions") as refused:
        agree(HARMFUL, confirmation, HERE, "table")
    assert refused.value.exit_code == 5
    assert "--override s1 and --reason TEXT" in refused.value.detail_next_step


def test_a_refusal_is_shown_by_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unsafe):
        agree(HARMFUL, replace(NOTHING, is_dry=True), HERE, "table")
    shown = capsys.readouterr().out
    assert shown.startswith("refused: storage remove s1\n")
    assert "0 (2 of 3 members level)" in shown
    with pytest.raises(Unsafe):
        agree(HARMFUL, replace(NOTHING, is_dry=True), HERE, "json")
    found = json.loads(capsys.readouterr().out)
    assert (found["result"], len(found["refusals"])) == ("refused", 1)
    assert found["margins"][0]["after"] == {"members": 3, "level": 1, "spare": -1}


@pytest.mark.parametrize(
    ("agreed", "confirmation", "is_done"),
    [
        (PLAN, YES, False),
        (PLAN, replace(NOTHING, confirm="payments"), False),
        (PLAN, replace(NOTHING, confirm="s1"), True),
        (TYPED, NOTHING, True),
    ],
)
def test_a_yes_is_for_no_change_that_became_dangerous_meanwhile(
    agreed: Plan, confirmation: ConfirmOptions, is_done: bool
) -> None:
    """A second storage fell silent while a person was asked: the change needs the name of its subject by then."""

    async def nothing(_cluster: Cluster, _report: object) -> dict[str, int]:
        return {"done": 1}

    async def again(_cluster: Cluster) -> Change:
        return Change(plan=TYPED, do=nothing)

    async def work() -> None:
        cluster = await Cluster.create(MemoryTree().connect(), META)
        change = Change(plan=agreed, do=nothing, is_planned_again=True)
        if is_done:
            assert await carried_out(cluster, change, again, confirmation, None, unreported) == {"done": 1}
        else:
            with pytest.raises(ChangedMeanwhile, match="more dangerous now"):
                await carried_out(cluster, change, again, confirmation, None, unreported)

    run(work())


def test_an_override_needs_a_reason() -> None:
    with pytest.raises(NotConfirmed, match="--override s1 needs --reason"):
        agree(HARMFUL, replace(YES, override="s1"), HERE, "table")


def test_reasons() -> None:
    def reason_of(*, confirmation: ConfirmOptions) -> int:
        return len(confirmation.reason or "")

    command = command_of("change", reason_of)
    assert command.main(["--reason", "x" * 1000], standalone_mode=False) == 1000
    for reason in ("", "x" * 1001, "\udcff"):
        with pytest.raises(BadArgument, match="--reason"):
            command.main(["--reason", reason], standalone_mode=False)


# -- what is written down ----------------------------------------------------------------------------------------------


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


async def only_entry(cluster: Cluster) -> HistoryEntry:
    ((number, entry),) = await cluster.history()
    assert number == 1
    return entry


def test_what_was_done_is_in_the_history() -> None:
    async def work() -> None:
        cluster = await Cluster.create(MemoryTree().connect(), META)
        async with recorded(cluster, PLAN, replace(YES, reason="new disks")):
            entry = await only_entry(cluster)
            assert (entry.outcome, entry.ended) == ("begun", None), "written before anything is done"
        entry = await only_entry(cluster)
        assert (entry.verb, entry.subject, entry.steps) == ("storage remove", "s1", PLAN.steps)
        assert (entry.reason, entry.outcome) == ("new disks", "done")
        assert entry.ended is not None
        assert entry.began <= entry.ended
        assert entry.who.startswith("unverified: ")
        assert "@" in entry.who

    run(work())


def test_the_name_in_the_history_is_that_of_the_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment says."""
    monkeypatch.setenv("LOGNAME", "ceo")
    ann = Authority(tmp_path).issue(META.key, Role.OPERATOR, "ann").tls(Role.OPERATOR)

    async def work() -> None:
        cluster = await Cluster.create(MemoryTree().connect(), META)
        async with recorded(cluster, PLAN, YES, ann):
            pass
        assert (await only_entry(cluster)).who == "ann"

    run(work())


def test_what_failed_or_was_interrupted_is_in_the_history() -> None:
    async def work() -> None:
        cluster = await Cluster.create(MemoryTree().connect(), META)
        with pytest.raises(ChangedMeanwhile):
            async with recorded(cluster, PLAN, YES):
                raise ChangedMeanwhile("somebody was faster \udcff")
        interrupted = asyncio.create_task(forever(cluster))
        while len(await cluster.history()) < 2:
            await asyncio.sleep(0)
        interrupted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await interrupted
        outcomes = [entry.outcome for _, entry in await cluster.history()]
        assert outcomes == ["W2025 somebody was faster \\udcff", "interrupted"]
        assert all(entry.ended is not None for _, entry in await cluster.history())

    async def forever(cluster: Cluster) -> None:
        async with recorded(cluster, PLAN, YES):
            await asyncio.Event().wait()

    run(work())


@pytest.mark.parametrize(("verb", "how"), [("partition assign", "resumed"), ("partition assign --cancel", "cancelled")])
def test_a_killed_command_is_closed_by_the_one_that_ends_its_moves(verb: str, how: str) -> None:
    async def work() -> None:
        cluster = await Cluster.create(MemoryTree().connect(), META)
        killed = HistoryEntry(
            began="2026-01-01", ended=None, who="ann", verb="storage remove", subject="s1", reason=None, steps=("x",),
            outcome="begun", moves=(0, 1),
        )  # fmt: skip
        await cluster.begin_history(killed)
        other = replace(killed, verb="partition assign", moves=(2,))
        await cluster.begin_history(other)
        await cluster.begin_history(replace(killed, moves=()))
        await cluster.save_moves(Moves(partitions={1: ("s2",)}), NO_VERSION)
        async with recorded(cluster, replace(PLAN, verb=verb, moves=(0,)), YES):
            pass
        assert dict(await cluster.history())[1] == killed, "one of its moves is not over"
        _, version = await cluster.moves()
        await cluster.save_moves(Moves(partitions={}), version)
        async with recorded(cluster, replace(PLAN, verb=verb, moves=(1,)), YES):
            pass
        found = dict(await cluster.history())
        assert found[1].outcome == f"{how} by entry 5, {found[5].who}"
        assert found[1].ended is not None
        assert found[2] == other, "nobody has touched its moves"
        assert found[3].ended is None
        assert found[5].outcome == "done"

    run(work())


def test_a_killed_command_is_closed_by_itself_when_its_moves_have_arrived() -> None:
    """Run again it has nothing to do, and writes no entry of its own."""

    async def work() -> None:
        cluster = await Cluster.create(MemoryTree().connect(), META)
        killed = HistoryEntry(
            began="2026-01-01", ended=None, who="ann", verb=PLAN.verb, subject=PLAN.subject, reason=None, steps=("x",),
            outcome="begun", moves=(0, 1),
        )  # fmt: skip
        others = [replace(killed, subject="s2"), replace(killed, verb="partition assign"), replace(killed, moves=())]
        for entry in (killed, *others):
            await cluster.begin_history(entry)
        await cluster.save_moves(Moves(partitions={1: ("s2",)}), NO_VERSION)
        await close_finished(cluster, replace(PLAN, steps=()))
        assert dict(await cluster.history())[1] == killed, "one of its moves is not over"
        _, version = await cluster.moves()
        await cluster.save_moves(Moves(partitions={}), version)
        await close_finished(cluster, replace(PLAN, steps=()))
        found = dict(await cluster.history())
        assert found[1].ended is not None
        assert found[1].outcome.startswith("its moves had arrived when ")
        assert [found[number] for number in (2, 3, 4)] == others

    run(work())


def test_a_history_that_cannot_be_read_fails_no_command_that_has_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def away(_: Cluster) -> None:
        raise CannotConnect("ZooKeeper is away")

    async def work() -> None:
        cluster = await Cluster.create(MemoryTree().connect(), META)
        monkeypatch.setattr(Cluster, "moves", away)
        await close_finished(cluster, replace(PLAN, steps=()))

    run(work())
    assert "recorded in the history: W4001 ZooKeeper is away" in capsys.readouterr().err


def test_an_entry_that_its_own_command_has_ended_stays() -> None:
    async def work() -> None:
        cluster = await Cluster.create(MemoryTree().connect(), META)
        async with recorded(cluster, replace(PLAN, moves=(0,)), YES):
            pass
        entry = await only_entry(cluster)
        await cluster.close_history(1, ended="later", outcome="resumed by entry 2")
        await cluster.close_history(2, ended="later", outcome="resumed by entry 3")
        assert await only_entry(cluster) == entry

    run(work())


def test_nothing_is_done_that_cannot_be_written_down() -> None:
    async def work() -> None:
        coordinator = MemoryTree().connect()
        cluster = await Cluster.create(coordinator, META)
        coordinator.disconnect()
        with pytest.raises(CannotConnect):
            async with recorded(cluster, PLAN, YES):
                raise AssertionError("it was begun")

    run(work())


def test_a_history_that_was_deleted_begins_anew() -> None:
    async def work() -> None:
        coordinator = MemoryTree().connect()
        cluster = await Cluster.create(coordinator, META)
        await coordinator.commit([Delete(HISTORY, 0)])
        async with recorded(cluster, PLAN, YES):
            pass
        assert (await only_entry(cluster)).outcome == "done"

    run(work())


def test_a_command_whose_cluster_is_deleted_before_it_begins_ends() -> None:
    async def work() -> None:
        cluster = await Cluster.create(MemoryTree().connect(), META)
        await cluster.delete()
        with pytest.raises(NodeMissing):
            async with recorded(cluster, PLAN, YES):
                raise AssertionError("it was begun")

    run(work())


def test_what_became_of_the_change_is_told_before_what_became_of_the_history(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def work() -> None:
        coordinator = MemoryTree().connect()
        cluster = await Cluster.create(coordinator, META)

        async def fail() -> None:
            await coordinator.commit([Delete(f"{HISTORY}/{1:010}", 0)])
            raise ChangedMeanwhile("somebody was faster")

        with pytest.raises(ChangedMeanwhile, match="somebody"):
            async with recorded(cluster, PLAN, YES):
                await fail()
        assert "recorded in the history, entry 1: W2026" in capsys.readouterr().err

    run(work())


def test_history_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    entry = HistoryEntry(
        began="2026-01-31T12:00:00+00:00", ended=None, who="ada@here", verb="server drain", subject="s1", reason=None,
        steps=("x",), outcome="begun",
    )  # fmt: skip
    put(history([(7, entry)]), "json")
    found = json.loads(capsys.readouterr().out)["history"]
    assert (found[0]["number"], found[0]["outcome"], found[0]["steps"]) == (7, "begun", ["x"])
    put(history([(7, entry)]), "table")
    shown = capsys.readouterr().out
    assert "server drain s1" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80
    put(history([]), "table")
    assert "Nothing was changed with waltzctl" in capsys.readouterr().out
