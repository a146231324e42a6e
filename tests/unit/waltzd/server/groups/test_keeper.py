"""Owners that write down where a group stands, one after the other and at once: the log always tells one story."""

from __future__ import annotations

import random

import pytest

from waltzd.cluster.groups import GroupMeta
from waltzd.protocol.channels import Parts
from waltzd.protocol.groups import Mode
from waltzd.server.groups.keeper import CHANGES_MAX, DELAY_SECONDS, UNWRITTEN_MAX, Keeper, Write
from waltzd.server.groups.ledger import Key, Ledger, gone, made, stands
from waltzd.server.groups.state import State

MAILER = GroupMeta(name="mailer", partitions=Parts("0"), mode=Mode.QUEUE)
KEY = Key("mailer", 0, 0)


class Log:
    """What a partition does with appends under one lock: refuse what has not seen the newest, and at times more."""

    def __init__(self, chance: random.Random | None = None) -> None:
        self.entries = [made(MAILER)]
        self._chance = chance
        self._marked = 0

    def append(self, write: Write) -> int | None:
        """The id, or None: refused."""
        is_estimate = self._chance is not None and self._chance.random() < 0.2 and write.position < len(self.entries) - 1
        if self._marked > write.position or is_estimate:
            return None
        self.entries.append(write.data)
        self._marked = len(self.entries) - 1
        return self._marked

    def others(self) -> None:
        """An entry about another partition of the group."""
        self.entries.append(stands("mailer", 1, 0, State(after=len(self.entries)).snapshot()))

    def read(self, ledger: Ledger) -> Ledger:
        for id in range(ledger.reach + 1, len(self.entries)):
            ledger.read(id, self.entries[id])
        return ledger


class Owner:
    def __init__(self, log: Log, now: float) -> None:
        self.log = log
        self.ledger = log.read(Ledger())
        self.keeper = Keeper(KEY, self.ledger, after=-1, now=now)
        self.late: list[Write] = []
        """Nobody knows what will become of them."""
        self.states: dict[int, bytes] = {1: self.keeper.state.snapshot()}
        """By the number of changes."""

    def change(self, now: float) -> None:
        state = self.keeper.state
        if state.open.first is not None:
            state.settle(state.open.first, state.open.first)
        state.reach_to(state.reach + 1, is_open=True)
        self.states[self.keeper.changed(now)] = state.snapshot()

    def told(self, write: Write | None, chance: random.Random) -> None:
        if write is None:
            return
        what = chance.randrange(6)
        if what == 0:
            self.late.append(write)
            self.keeper.doubtful()
            return
        id = self.log.append(write)
        if id is None or what == 1:
            self.keeper.doubtful()
        else:
            self.keeper.committed(id)
        self.check()

    def check(self) -> None:
        """What it takes for kept is in the log, for as long as nobody else has claimed the group."""
        state = self.log.read(Ledger()).state("mailer", 0)
        if self.keeper.kept and state is not None and state.epoch == self.keeper.state.epoch:
            assert state.snapshot() in [self.states[n] for n in self.states if n >= self.keeper.kept]

    def look(self, chance: random.Random) -> None:
        self.log.read(self.ledger)
        self.told(self.keeper.look(self.ledger), chance)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(2))
def test_whoever_claims_it_and_whatever_is_lost_the_log_tells_one_story(chunk: int) -> None:
    for seed in range(25 * chunk, 25 * (chunk + 1)):
        chance = random.Random(seed)
        log, owners, now = Log(chance), list[Owner](), 0.0
        for _ in range(120):
            now += chance.choice([0.0, 0.4, 1.0])
            what = chance.randrange(12)
            if what == 0 or not owners:
                owners.append(Owner(log, now))
                continue
            owner = chance.choice(owners[-3:])
            if what == 1:
                log.others()
                log.read(owner.ledger)  # it follows the log, and has not looked yet
            elif what < 5 and owner.keeper.is_claimed:
                owner.change(now)
            elif what < 8:
                owner.told(owner.keeper.write(now, owner.ledger, is_urgent=chance.random() < 0.5), chance)
            elif what == 8 and owner.late:
                log.append(owner.late.pop(chance.randrange(len(owner.late))))
            elif what > 8:
                owner.look(chance)
            log.read(Ledger())  # nothing that was replaced has written
        last = Owner(log, now)
        for _ in range(100):
            last.told(last.keeper.write(now, last.ledger, is_urgent=True), random.Random(7))
            last.look(random.Random(7))
            if last.keeper.is_deposed:
                last = Owner(log, now)
        last.change(now)
        before = last.keeper.kept
        for _ in range(100):
            last.told(last.keeper.write(now + 5, last.ledger), chance)
            last.look(chance)
        assert last.keeper.kept > before, "alone, it comes to its end"
        assert log.read(Ledger()).state("mailer", 0) == last.keeper.state


def claimed(log: Log, now: float = 0.0) -> Owner:
    owner = Owner(log, now)
    write = owner.keeper.write(now, owner.ledger)
    assert write is not None
    id = log.append(write)
    assert id is not None
    owner.keeper.committed(id)
    return owner


def test_an_owner_that_was_replaced_writes_nothing_however_late_it_notices() -> None:
    log = Log()
    old = claimed(log)
    new = claimed(log)
    assert new.keeper.state.epoch == old.keeper.state.epoch + 1
    old.change(0)
    log.read(old.ledger)
    write = old.keeper.write(0, old.ledger, is_urgent=True)
    assert write is not None
    assert log.append(write) is None
    old.keeper.doubtful()
    assert old.keeper.look(log.read(old.ledger)) is None
    assert old.keeper.is_deposed
    assert old.keeper.write(99, old.ledger, is_urgent=True) is None


def test_a_needless_refusal_is_no_end() -> None:
    log = Log()
    owner = claimed(log)
    owner.change(0)
    write = owner.keeper.write(0, owner.ledger, is_urgent=True)
    assert write is not None
    log.others()
    owner.keeper.doubtful()
    again = owner.keeper.look(log.read(owner.ledger))
    assert again == write._replace(position=owner.ledger.reach)
    assert (owner.keeper.is_deposed, owner.keeper.kept) == (False, 1)


def test_what_was_committed_without_an_answer_is_found() -> None:
    log = Log()
    owner = claimed(log)
    owner.change(0)
    write = owner.keeper.write(0, owner.ledger, is_urgent=True)
    assert write is not None
    log.append(write)
    owner.keeper.doubtful()
    assert owner.keeper.look(log.read(owner.ledger)) is None
    assert (owner.keeper.kept, owner.keeper.is_deposed) == (2, False)


def test_what_is_answered_is_in_the_entry_that_was_committed() -> None:
    owner = claimed(Log())
    owner.change(0)
    assert owner.keeper.write(0, owner.ledger, is_urgent=True) is not None
    number = owner.keeper.changed(0)
    owner.keeper.committed(7)
    assert owner.keeper.kept == number - 1


def test_a_claim_that_is_not_plainly_committed_begins_anew() -> None:
    log = Log()
    owner = Owner(log, 0)
    write = owner.keeper.write(0, owner.ledger)
    assert write is not None
    log.append(write)
    owner.keeper.doubtful()
    owner.keeper.look(log.read(owner.ledger))
    assert (owner.keeper.is_deposed, owner.keeper.is_claimed) == (True, False)
    assert claimed(log).keeper.state.epoch == 3


def test_a_group_that_is_gone_has_no_owner() -> None:
    log = Log()
    owner = claimed(log)
    log.entries.append(gone("mailer", 0))
    assert owner.keeper.look(log.read(owner.ledger)) is None
    assert owner.keeper.is_deposed


def test_acknowledgements_wait_for_company_and_what_is_waited_for_does_not() -> None:
    owner = claimed(Log())
    keeper, ledger = owner.keeper, owner.ledger
    assert (keeper.wake(), keeper.write(99, ledger)) == (None, None)
    owner.change(10)
    assert (keeper.wake(), keeper.write(10.5, ledger)) == (10 + DELAY_SECONDS, None)
    assert keeper.write(10.5, ledger, is_urgent=True) is not None
    assert keeper.write(99, ledger, is_urgent=True) is None, "one at a time"
    keeper.committed(7)
    owner.change(20)
    assert keeper.changed(20, CHANGES_MAX - 1) - keeper.kept == CHANGES_MAX
    assert keeper.write(20, ledger) is not None


def test_a_group_pauses_where_too_much_cannot_be_written() -> None:
    owner = claimed(Log())
    owner.change(0)
    owner.keeper.changed(0, UNWRITTEN_MAX - 2)
    assert not owner.keeper.must_pause
    assert owner.keeper.changed(0) == 1 + UNWRITTEN_MAX
    assert owner.keeper.must_pause
    owner.keeper.write(9, owner.ledger)
    owner.keeper.committed(9)
    assert not owner.keeper.must_pause


def test_what_is_overdue_is_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waltzd.server.groups.ledger.SLACK_BYTES", 0)
    log = Log()
    owner = claimed(log)
    sizes = []
    for turn in range(60):
        owner.change(turn)
        log.read(owner.ledger)
        write = owner.keeper.write(turn + 1, owner.ledger)
        assert write is not None
        id = log.append(write)
        assert id is not None
        owner.keeper.committed(id)
        if log.read(owner.ledger).overdue == Key("mailer", 0, -1):
            log.entries.append(made(MAILER, 0))
        sizes.append(log.read(owner.ledger).bytes)
    assert max(sizes[30:]) <= max(sizes[:30])
    assert owner.ledger.state("mailer", 0) == owner.keeper.state


def test_a_reset_does_not_take_the_claim_of_another_owner_for_its_own_entry() -> None:
    log = Log()
    old = claimed(log)
    old.keeper.reset(State(after=2, epoch=old.keeper.state.epoch + 1), 0)
    write = old.keeper.write(0, old.ledger, is_urgent=True)
    assert write is not None
    new = claimed(log)
    assert new.keeper.state.epoch == old.keeper.state.epoch
    assert log.append(write) is None
    old.keeper.doubtful()
    assert old.keeper.look(log.read(old.ledger)) is None
    assert old.keeper.is_deposed
