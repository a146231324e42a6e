"""Histories that a consumer group which keeps its promises leaves, made up from a seed.

The decisions are those of the product: a `Table` over a `State`, of which a snapshot survives a change of owner. Around
them everything is made up: streams that keep their order and are cut, members that work, hang, crash and come back,
operators. So a mistake in the decisions themselves leaves a history that is not sound, too.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from tests.checker.group_history import Changed, Delivered, GroupHistory, Said, Standing, Written
from waltzd.protocol.groups import AckResult, Exhausted, Mode
from waltzd.server.groups.delivery_tracker import Delivery, DeliveryTracker, GroupSettings
from waltzd.server.groups.state import GroupState

SECOND = 1_000_000_000
WRITE_SECONDS = 1.0
MEMBERS = 3
STEPS_TO_END = 20_000


@dataclass
class _Stream:
    holder: str
    name: str
    epoch: int
    inbox: deque[Delivery | Said] = field(default_factory=deque)
    outbox: deque[Said] = field(default_factory=deque)
    held: list[Delivered] = field(default_factory=list)


class _Story:
    def __init__(self, seed: int, partition: int, history: GroupHistory, settings: GroupSettings, size: int) -> None:
        self.chance, self.partition, self.history, self.settings = random.Random(seed), partition, history, settings
        self.now, self.last = 0.0, 0
        self.size = size
        self.log: dict[int, Written] = {}
        history.log[partition] = self.log
        self.kept = GroupState(after=history.starts.get(partition, -1)).snapshot()
        self.streams: dict[str, _Stream] = {}
        self.lives = self.numbers = 0
        self.old: list[Delivered] = []
        """What members still have of epochs that are over."""
        self.in_doubt: list[Said] = []
        """Heard, and not kept."""
        self.take_over()

    def at(self) -> int:
        self.last = max(self.last + 1, round(self.now * SECOND))
        return self.last

    # -- the owner

    def take_over(self) -> None:
        state = GroupState.of(self.kept)
        state.begin_epoch()
        self.table = DeliveryTracker(self.settings, state)
        for stream in self.streams.values():
            self.old += stream.held
        self.streams = {}
        self.write()

    def write(self) -> None:
        self.kept, self.written_at = self.table.state.snapshot(), self.now
        for said in self.in_doubt:
            stream = self.streams.get(said.holder.partition(".")[0])
            is_settled = self.table.state.open.get(said.id) is None or said.verb == "nack"
            if stream is not None and stream.holder == said.holder and is_settled and self.chance.random() < 0.5:
                said.is_kept = said.answer in ("taken", "done")
        self.in_doubt = []

    def work(self) -> None:
        table = self.table
        for id in table.again:
            self.offer(id)
        while table.room and table.upcoming < len(self.log):
            self.offer(table.upcoming)
        table.expire(self.now)
        for delivery in table.deliver(self.now):
            self.streams[delivery.member].inbox.append(delivery)
        if self.now >= self.written_at + WRITE_SECONDS:
            self.write()
        table.check()

    def offer(self, id: int) -> None:
        written = self.log[id]
        self.table.offer(id, written.key, is_wanted=self.history.is_wanted(written))

    def hear(self, stream: _Stream) -> None:
        said = stream.outbox.popleft()
        about = said.epoch, said.tag, said.id, said.id, self.now
        if said.verb == "ack":
            verdict = self.table.acknowledge(stream.name, *about)
        elif said.verb == "nack":
            verdict = self.table.refuse(stream.name, *about, reason="it failed")
        else:
            verdict = self.table.reject(stream.name, *about, reason="nonsense")
        said.answer = _word(verdict)
        if self.chance.random() < 0.9:
            stream.inbox.append(said)
        else:
            said.answer = ""
        self.in_doubt.append(said)

    # -- members

    def join(self) -> None:
        name = f"m{self.chance.randrange(MEMBERS)}"
        if name in self.streams:
            return
        self.lives += 1
        self.table.join(name)
        self.streams[name] = _Stream(f"{name}.{self.partition}.{self.lives}", name, self.table.state.epoch)

    def leave(self, *, is_lost: bool) -> None:
        if self.streams:
            stream = self.streams.pop(self.chance.choice(list(self.streams)))
            self.old += stream.held
            self.table.leave(stream.name, self.now, is_lost=is_lost)

    def receive(self, stream: _Stream) -> None:
        one = stream.inbox.popleft()
        if isinstance(one, Said):
            one.returned = self.at()
            return
        epoch, written = self.table.state.epoch, self.log[one.id]
        given = Delivered(
            self.at(), stream.holder, self.partition, epoch, one.tag, one.id, one.attempt, written.name, written.header
        )
        self.history.delivered.append(given)
        stream.held.append(given)

    def say(self, stream: _Stream, one: Delivered, verb: str) -> None:
        self.numbers += 1
        said = Said(
            self.at(),
            f"{self.partition}.{self.numbers}",
            stream.holder,
            self.partition,
            one.epoch,
            one.tag,
            one.id,
            verb,
            stream.epoch,
        )
        self.history.said.append(said)
        stream.outbox.append(said)

    # -- operators

    def operate(self) -> None:
        table, state = self.table, self.table.state
        match self.chance.randrange(5):
            case 0 | 1 if state.parked:
                ids = tuple(self.chance.sample(sorted(state.parked), self.chance.randrange(1, len(state.parked) + 1)))
                verb = self.chance.choice(("replay", "replay", "discard"))
                at = self.at()
                (table.replay if verb == "replay" else table.discard)(ids)
                self.done(Changed(at, verb, self.partition, ids=ids))
            case 2 if self.chance.random() < 0.2 and state.reach >= 0:
                up_to, at = self.chance.randrange(state.reach + 1), self.at()
                table.skip(0, up_to, self.now)
                self.done(Changed(at, "skip", self.partition, up_to=up_to))
            case 3 if state.stopped:
                table.resume()
            case 4 if self.chance.random() < 0.1 and self.log:
                after, at = self.chance.randrange(-1, len(self.log)), self.at()
                self.kept = GroupState(after=after, epoch=state.epoch).snapshot()
                self.take_over()
                self.done(Changed(at, "reset", self.partition, up_to=after))

    def done(self, change: Changed) -> None:
        self.write()
        change.returned, change.epoch = self.at(), self.table.state.epoch
        self.history.changed.append(change)

    # -- all of it

    def step(self, *, is_mended: bool) -> None:
        chance = self.chance
        self.now += chance.choice((0.0, 0.01, 0.1, 0.5))
        if len(self.log) < self.size and chance.random() < 0.5:
            id = len(self.log)
            key = chance.choice((None, "a", "b")) if self.settings.mode is Mode.KEYED else None
            self.log[id] = Written(f"{self.partition}/{id}", chance.randrange(3), key)
        dice = chance.random()
        if not self.streams or dice < 0.05:
            self.join()
        elif dice < 0.08 and not is_mended:
            self.leave(is_lost=chance.random() < 0.6)
        elif dice < 0.09 and not is_mended:
            self.take_over()
        elif dice < 0.12 and not is_mended:
            self.operate()
        self.work()
        for stream in list(self.streams.values()):
            if stream.inbox and chance.random() < 0.7:
                self.receive(stream)
            if stream.held and chance.random() < 0.5:
                one = stream.held.pop(chance.randrange(len(stream.held)) if chance.random() < 0.3 else 0)
                if is_mended or chance.random() < 0.9:  # else it forgets it
                    verbs = ("ack",) if is_mended else ("ack", "ack", "ack", "ack", "nack", "nack", "reject")
                    self.say(stream, one, chance.choice(verbs))
            mine = {one.id for one in stream.held}
            for one in [one for one in self.old if one.id in mine or chance.random() < 0.02]:
                self.old.remove(one)
                self.say(stream, one, "ack")
            if stream.outbox and chance.random() < 0.7:
                self.hear(stream)

    def tell(self) -> None:
        while len(self.log) < self.size:
            self.step(is_mended=False)
        for _ in range(STEPS_TO_END):
            if self.table.state.floor == len(self.log) - 1 or self.table.state.stopped:
                break
            self.step(is_mended=True)
        state = self.table.state
        parked = {id: one.failures for id, one in state.parked.items()}
        self.history.standings[self.partition] = Standing(state.floor, state.stopped, parked)


def _word(verdict: AckResult) -> str:
    if verdict.is_old:
        return "old"
    return next((name for name in ("taken", "done", "late", "unknown") if getattr(verdict, name)), "")


def group_sample(seed: int, size: int, *, partitions: int = 1, mode: Mode | None = None) -> GroupHistory:
    chance = random.Random(f"group {seed}")
    settings = GroupSettings(
        mode=mode or chance.choice(list(Mode)),
        ack_wait=chance.choice((2.0, 10.0)),
        max_in_flight=chance.choice((1, 2, 5)),
        deliver_max=chance.choice((1, 2, 4)),
        back_off=chance.choice(((), (0.1, 1.0))),
        exhausted=chance.choice((Exhausted.PARK, Exhausted.PARK, Exhausted.STOP)),
    )
    history = GroupHistory(
        mode=settings.mode,
        room=settings.max_in_flight,
        deliver_max=settings.deliver_max,
        exhausted=settings.exhausted,
        headers=chance.choice(((), (0, 1))),
        starts={0: chance.choice((-1, 2))},
        window=round(1.6 * SECOND),
        outages=chance.choice(([], [(2 * SECOND, 4 * SECOND), (6 * SECOND, 7 * SECOND)])),
    )
    for partition in range(partitions):
        _Story(seed + partition, partition, history, settings, size).tell()
    return history
