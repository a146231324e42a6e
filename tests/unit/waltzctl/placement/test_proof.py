"""What proves that documents may be put back: every document that is proven goes to a real recovery, and opens above all
that was acknowledged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, product

import pytest

from tests.unit.waltzctl.placement.test_rescue_scene import DAMAGE, HOME, MEMBERS, driven, holds, written
from waltzctl.placement.proof import Proven, Statement, Unproven, from_saved, from_storages
from waltzd.cluster.documents import LEASE_MS_MAX, Decision, Membership, PartitionMeta
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.quorum import EMPTY, majority


def statement(*statuses: ReplicaStatus, blank: str = "", silent: str = "") -> Statement:
    named = {name: status for status in statuses for name, home in HOME.items() if home == status.incarnation}
    return Statement(
        partition=0, statuses=named, blank=frozenset(blank), silent=dict.fromkeys(silent, "it does not answer")
    )


def subsets(names: str, least: int) -> list[str]:
    return ["".join(some) for size in range(least, len(names) + 1) for some in combinations(names, size)]


def test_a_document_that_nothing_contradicts_stays_as_it_is() -> None:
    told = statement(*(holds(name, 9, promised=2) for name in "ABC"))
    voting, closed = written(session=3), written(decision=Decision(mark=9, session=2))
    for saved in (written(session=2), voting, closed):
        assert from_saved(told, saved, MEMBERS, replicas=3, generation=1) == Proven(partition=0, meta=saved, roles=MEMBERS)
    assert from_saved(Statement(partition=0), None, MEMBERS, replicas=3, generation=1) == Proven(
        partition=0, meta=None, roles=MEMBERS
    )


@pytest.mark.parametrize(
    ("saved", "status", "why"),
    [
        (written(session=2), holds("A", 9, session=4, promised=4), "has begun session 4"),
        (written(session=2), holds("A", 9, promised=3), "has promised itself to session 3"),
        (written(session=3), holds("A", 9, session=3, promised=3), "has begun session 3"),
        (written(decision=Decision(mark=6, session=3)), holds("A", 9, committed=8), "know"),
        (None, holds("A", 9, promised=2), "was never opened"),
    ],
)
def test_a_document_that_is_too_old_needs_all_storages(
    saved: PartitionMeta | None, status: ReplicaStatus, why: str
) -> None:
    found = from_saved(statement(status, silent="BC"), saved, MEMBERS, replicas=3, generation=1)
    assert isinstance(found, Unproven)
    assert why in found.missing
    assert "B does not report its replica (it does not answer)" in found.missing


def test_what_a_rescue_gave_up_stays_given_up() -> None:
    saved = written(given_up={3: 7})
    told = statement(*(holds(name, 9, session=5, low_mark=8, promised=5) for name in "AB"), holds("C", 20, committed=18))
    found = from_saved(told, saved, MEMBERS, replicas=3, generation=1)
    assert isinstance(found, Proven)
    assert found.meta is not None
    assert found.meta.given_up[3] == 7
    assert found.meta.decision is not None
    assert found.meta.decision.mark == 9


def is_right(found: Proven, statuses: Mapping[str, ReplicaStatus], roles: Mapping[str, Membership]) -> int:
    """It opens at its mark, above every promise."""
    assert found.scene is not None
    session = found.scene.session
    assert session > max(status.promised_session for status in statuses.values())
    fenced = {name: replace(status, promised_session=session) for name, status in statuses.items()}
    after = found.fenced(session, fenced)
    assert after.meta is not None
    core = driven(after.meta, after.roles, fenced, frozenset())
    assert core.step == "OPEN", core.waiting()
    assert after.roles == roles
    assert core.mark is not None
    return core.mark


def test_all_storages_together_prove_where_the_log_ends() -> None:
    older = {name: holds(name, last_id, session=1, low_mark=2) for name, last_id in (("C", 12), ("D", 3))}
    statuses = {"A": holds("A", 9), "B": holds("B", 7), **older}
    found = from_storages(statement(*statuses.values()), replicas=3, generation=5)
    assert isinstance(found, Proven)
    roles = {"A": Membership.MEMBER, "B": Membership.MEMBER, "C": Membership.LEARNER}
    assert is_right(found, statuses, roles) == 9


def test_documents_from_storages_have_the_longest_lease_that_an_owner_may_have_had() -> None:
    """Storages know of none, and the owner of before may still answer by its own."""
    told = statement(*(holds(name, 9, promised=2) for name in "ABC"))
    found = from_storages(told, replicas=3, generation=1)
    assert isinstance(found, Proven)
    assert found.meta is not None
    assert found.meta.lease_ms == LEASE_MS_MAX


def test_a_partition_that_was_never_used_begins_above_what_was_promised() -> None:
    unused = [replace(holds(name, EMPTY, session=-1, low_mark=EMPTY), promised_session=3) for name in "ABC"]
    found = from_storages(statement(*unused), replicas=3, generation=5)
    assert found == Proven(partition=0, meta=PartitionMeta(generation=5, session=3), roles=MEMBERS)
    assert isinstance(from_storages(statement(blank="ABC"), replicas=3, generation=5), Unproven)


@pytest.mark.parametrize(
    ("statuses", "why"),
    [
        ([holds("A", 9)], "the newest session, 2, has begun on A only, and 2 of 3 replicas would prove"),
        ([holds("A", 9), replace(holds("B", 9), findings=(DAMAGE,))], "B has begun the newest session, 2, and is damaged"),
        ([holds("A", 9), replace(holds("B", 9), is_available=False)], "the replica on B was taken offline"),
        ([holds("A", 5, low_mark=20), holds("B", 6, low_mark=20)], "ids up to 20 are known to be committed"),
        (
            [holds("A", 9), holds("B", 9), holds("C", 30, session=1, committed=25)],
            "C knows that ids up to 25 are committed",
        ),
    ],
)
def test_the_fact_that_is_missing_is_named(statuses: list[ReplicaStatus], why: str) -> None:
    found = from_storages(statement(*statuses), replicas=3, generation=5)
    assert isinstance(found, Unproven)
    assert why in found.missing


@pytest.mark.slow
def test_every_small_cluster_that_is_believed_holds_all_that_was_acknowledged() -> None:
    """Two sessions, four storages, every list of three members of the newest one, whoever began it, whatever each holds."""
    believed = 0
    for members in subsets("ABCD", 3)[:4]:
        for began in subsets("ABCD", 1):
            for lengths in product((4, 7), repeat=len(began)):
                held = dict(zip(began, lengths, strict=True))
                counting = [name for name in members if name in began]
                if len(counting) < majority(3):
                    continue
                acknowledged = max(min(held[one] for one in some) for some in combinations(counting, majority(3)))
                statuses = {
                    name: holds(name, held[name]) if name in began else holds(name, 3, session=1, low_mark=2)
                    for name in "ABCD"
                }
                found = from_storages(statement(*statuses.values()), replicas=3, generation=1)
                assert isinstance(found, Proven)
                believed += 1
                assert is_right(found, statuses, found.roles) >= acknowledged
    assert believed > 100
