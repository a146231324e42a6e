"""Owners that write down where a group stands, one after the other and at once: the log always tells one story."""

from __future__ import annotations

import random

import pytest

from waltzd.cluster.groups import GroupMeta
from waltzd.protocol.channels import Parts
from waltzd.protocol.groups import Mode
from waltzd.server.groups.state import GroupState
from waltzd.server.groups.state_log import GroupStateLog, Key, deletion_entry, group_entry, state_entry
from waltzd.server.groups.state_writer import CHANGES_MAX, DELAY_SECONDS, UNWRITTEN_MAX, GroupStateWriter, Write

MAILER = GroupMeta(name="mailer", partitions=Parts("0"), mode=Mode.QUEUE)
KEY = Key("mailer", 0, 0)


class Log:
    """What a partition does with appends under one lock: refuse what has not seen the newest, and at times more."""

    def __init__(self, chance: random.Random | None = None) -> None:
        self.entries = [group_entry(MAILER)]
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
        self.entries.append(state_entry("mailer", 1, 0, GroupState(after=len(self.entries)).snapshot()))

    def read(self, state_log: GroupStateLog) -> GroupStateLog:
        for id in range(state_log.reach + 1, len(self.entries)):
            state_log.read(id, self.entries[id])
        return state_log


class Owner:
    def __init__(self, log: Log, now: float) -> None:
        self.log = log
        self.state_log = log.read(GroupStateLog())
        self.writer = GroupStateWriter(KEY, self.state_log, after=-1, now=now)
        self.late: list[Write] = []
        """Nobody knows what will become of them."""
        self.states: dict[int, bytes] = {1: self.writer.state.snapshot()}
        """By the number of changes."""

    def change(self, now: float) -> None:
        state = self.writer.state
        if state.open.first is not None:
            state.settle(state.open.first, state.open.first)
        state.reach_to(state.reach + 1, is_open=True)
        self.states[self.writer.changed(now)] = state.snapshot()

    def told(self, write: Write | None, chance: random.Random) -> None:
        if write is None:
            return
        what = chance.randrange(6)
        if what == 0:
            self.late.append(write)
            self.writer.doubtful()
            return
        id = self.log.append(write)
        if id is None or what == 1:
            self.writer.doubtful()
        else:
            self.writer.committed(id)
        self.check()

    def check(self) -> None:
        """What it takes for kept is in the log, for as long as nobody else has claimed the group."""
        state = self.log.read(GroupStateLog()).state("mailer", 0)
        if self.writer.kept and state is not None and state.epoch == self.writer.state.epoch:
            assert state.snapshot() in [self.states[n] for n in self.states if n >= self.writer.kept]

    def look(self, chance: random.Random) -> None:
        self.log.read(self.state_log)
        self.told(self.writer.look(self.state_log), chance)


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
                log.read(owner.state_log)  # it follows the log, and has not looked yet
            elif what < 5 and owner.writer.is_claimed:
                owner.change(now)
            elif what < 8:
                owner.told(owner.writer.write(now, owner.state_log, is_urgent=chance.random() < 0.5), chance)
            elif what == 8 and owner.late:
                log.append(owner.late.pop(chance.randrange(len(owner.late))))
            elif what > 8:
                owner.look(chance)
            log.read(GroupStateLog())  # nothing that was replaced has written
        last = Owner(log, now)
        for _ in range(100):
            last.told(last.writer.write(now, last.state_log, is_urgent=True), random.Random(7))
            last.look(random.Random(7))
            if last.writer.is_deposed:
                last = Owner(log, now)
        last.change(now)
        before = last.writer.kept
        for _ in range(100):
            last.told(last.writer.write(now + 5, last.state_log), chance)
            last.look(chance)
        assert last.writer.kept > before, "alone, it comes to its end"
        assert log.read(GroupStateLog()).state("mailer", 0) == last.writer.state


def claimed(log: Log, now: float = 0.0) -> Owner:
    owner = Owner(log, now)
    write = owner.writer.write(now, owner.state_log)
    assert write is not None
    id = log.append(write)
    assert id is not None
    owner.writer.committed(id)
    return owner


def test_an_owner_that_was_replaced_writes_nothing_however_late_it_notices() -> None:
    log = Log()
    old = claimed(log)
    new = claimed(log)
    assert new.writer.state.epoch == old.writer.state.epoch + 1
    old.change(0)
    log.read(old.state_log)
    write = old.writer.write(0, old.state_log, is_urgent=True)
    assert write is not None
    assert log.append(write) is None
    old.writer.doubtful()
    assert old.writer.look(log.read(old.state_log)) is None
    assert old.writer.is_deposed
    assert old.writer.write(99, old.state_log, is_urgent=True) is None


def test_a_needless_refusal_is_no_end() -> None:
    log = Log()
    owner = claimed(log)
    owner.change(0)
    write = owner.writer.write(0, owner.state_log, is_urgent=True)
    assert write is not None
    log.others()
    owner.writer.doubtful()
    again = owner.writer.look(log.read(owner.state_log))
    assert again == write._replace(position=owner.state_log.reach)
    assert (owner.writer.is_deposed, owner.writer.kept) == (False, 1)


def test_what_was_committed_without_an_answer_is_found() -> None:
    log = Log()
    owner = claimed(log)
    owner.change(0)
    write = owner.writer.write(0, owner.state_log, is_urgent=True)
    assert write is not None
    log.append(write)
    owner.writer.doubtful()
    assert owner.writer.look(log.read(owner.state_log)) is None
    assert (owner.writer.kept, owner.writer.is_deposed) == (2, False)


def test_what_is_answered_is_in_the_entry_that_was_committed() -> None:
    owner = claimed(Log())
    owner.change(0)
    assert owner.writer.write(0, owner.state_log, is_urgent=True) is not None
    number = owner.writer.changed(0)
    owner.writer.committed(7)
    assert owner.writer.kept == number - 1


def test_a_claim_that_is_not_plainly_committed_begins_anew() -> None:
    log = Log()
    owner = Owner(log, 0)
    write = owner.writer.write(0, owner.state_log)
    assert write is not None
    log.append(write)
    owner.writer.doubtful()
    owner.writer.look(log.read(owner.state_log))
    assert (owner.writer.is_deposed, owner.writer.is_claimed) == (True, False)
    assert claimed(log).writer.state.epoch == 3


def test_a_group_that_is_gone_has_no_owner() -> None:
    log = Log()
    owner = claimed(log)
    log.entries.append(deletion_entry("mailer", 0))
    assert owner.writer.look(log.read(owner.state_log)) is None
    assert owner.writer.is_deposed


def test_acknowledgements_wait_for_company_and_what_is_waited_for_does_not() -> None:
    owner = claimed(Log())
    writer, state_log = owner.writer, owner.state_log
    assert (writer.wake(), writer.write(99, state_log)) == (None, None)
    owner.change(10)
    assert (writer.wake(), writer.write(10.5, state_log)) == (10 + DELAY_SECONDS, None)
    assert writer.write(10.5, state_log, is_urgent=True) is not None
    assert writer.write(99, state_log, is_urgent=True) is None, "one at a time"
    writer.committed(7)
    owner.change(20)
    assert writer.changed(20, CHANGES_MAX - 1) - writer.kept == CHANGES_MAX
    assert writer.write(20, state_log) is not None


def test_a_group_pauses_where_too_much_cannot_be_written() -> None:
    owner = claimed(Log())
    owner.change(0)
    owner.writer.changed(0, UNWRITTEN_MAX - 2)
    assert not owner.writer.must_pause
    assert owner.writer.changed(0) == 1 + UNWRITTEN_MAX
    assert owner.writer.must_pause
    owner.writer.write(9, owner.state_log)
    owner.writer.committed(9)
    assert not owner.writer.must_pause


def test_what_is_overdue_is_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waltzd.server.groups.state_log.SLACK_BYTES", 0)
    log = Log()
    owner = claimed(log)
    sizes = []
    for turn in range(60):
        owner.change(turn)
        log.read(owner.state_log)
        write = owner.writer.write(turn + 1, owner.state_log)
        assert write is not None
        id = log.append(write)
        assert id is not None
        owner.writer.committed(id)
        if log.read(owner.state_log).overdue == Key("mailer", 0, -1):
            log.entries.append(group_entry(MAILER, 0))
        sizes.append(log.read(owner.state_log).bytes)
    assert max(sizes[30:]) <= max(sizes[:30])
    assert owner.state_log.state("mailer", 0) == owner.writer.state


def test_a_reset_does_not_take_the_claim_of_another_owner_for_its_own_entry() -> None:
    log = Log()
    old = claimed(log)
    old.writer.reset(GroupState(after=2, epoch=old.writer.state.epoch + 1), 0)
    write = old.writer.write(0, old.state_log, is_urgent=True)
    assert write is not None
    new = claimed(log)
    assert new.writer.state.epoch == old.writer.state.epoch
    assert log.append(write) is None
    old.writer.doubtful()
    assert old.writer.look(log.read(old.state_log)) is None
    assert old.writer.is_deposed
