"""Members of a consumer group that work, hang, forget, give up and come back, and write down all that they see.

They speak to owners through ports, below the library: so what they were given, with which tag, and what was answered is
evidence at first hand, also where a client would hide it. One `Member` has one name in one partition; each of its streams
is another holder. The port may be of a simulation, of a cluster in this process, or of real daemons.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from uuid import UUID

import numpy as np

from tests.checker.group_history import Changed, Delivered, GroupHistory, GroupWriter, Said
from tests.checker.recorder import payload_key
from waltzd.cluster.groups import GroupPort
from waltzd.errors import Displaced, WaltzError
from waltzd.protocol.groups import (
    Ack,
    AckKind,
    AckResult,
    AcksDurable,
    Deliveries,
    DeliveryFrame,
    Dismissed,
    Joined,
    JoinRequest,
    Leave,
    MemberFrame,
)
from waltzd.protocol.peers import AttendPort

VERBS = {"ack": AckKind.ACKNOWLEDGE, "nack": AckKind.REFUSE, "reject": AckKind.REJECT}
WINDOW = 2 * 10**9
"""So long may an acknowledgement be only in an owner's memory: a second by promise, and one for a machine that does much
else to write it."""
_NAMES = {verb: name for name, verb in VERBS.items()}
_counter = itertools.count(1)


class GroupMemory:
    """Keeps what happens in a history; `on_line` is told in words."""

    def __init__(self, history: GroupHistory, on_line: Callable[[str], None] = lambda line: None) -> None:
        self._history = history
        self._on_line = on_line

    def delivered(self, one: Delivered) -> None:
        self._history.delivered.append(one)
        self._on_line(f"{one.holder} has {one.id} of partition {one.partition}, {one.epoch}/{one.tag}, try {one.attempt}")

    def said(self, one: Said) -> None:
        self._history.said.append(one)
        self._on_line(f"{one.holder} says {one.verb} of {one.id}, {one.epoch}/{one.tag}, in epoch {one.stands_in}")

    def answered(self, one: Said) -> None:
        self._on_line(f"{one.holder} hears that {one.verb} of {one.id} is {one.answer}")

    def kept(self, one: Said) -> None:
        self._on_line(f"{one.holder} hears that {one.verb} of {one.id} is kept")

    def changed(self, one: Changed) -> None:
        self._history.changed.append(one)
        self._on_line(f"the operator: {one}")


class Clock:
    """Nanoseconds that rise with every look."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._last = 0

    def __call__(self) -> int:
        self._last = max(self._last + 1, round(self._seconds() * 1e9))
        return self._last


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How often of a hundred times, for each delivery."""

    nack: int = 8
    reject: int = 2
    forget: int = 3
    hang: int = 1
    cut: int = 1
    """It leaves its stream without a word."""
    leave: int = 1
    think_seconds: float = 0.05
    """At most, usually."""
    hang_seconds: float = 4.0
    room: int | None = None


CALM_SECONDS = 6.0
CALM = Habits(nack=0, reject=0, forget=0, hang=0)
GOOD = Habits(nack=0, reject=0, forget=0, hang=0, cut=0, leave=0, think_seconds=0.005)


def is_calm(seconds: float) -> bool:
    """Every other stretch of a race. What puts a transaction aside is written at once, and all acknowledgements with it: in
    a calm stretch nobody does that, so that these wait for the second that they may."""
    return seconds % (2 * CALM_SECONDS) >= CALM_SECONDS


@dataclass
class _Stream:
    holder: str
    link: AttendPort
    epoch: int = 0
    held: list[Delivered] = field(default_factory=list)
    newest: dict[int, int] = field(default_factory=dict)
    """Tag of the last delivery of each id, whatever became of it."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    words: dict[int, list[Said]] = field(default_factory=dict)
    """What was said and is not answered, by number."""
    answered: dict[int, list[Said]] = field(default_factory=dict)
    """And what is not kept."""
    number: int = 0

    def is_newest(self, one: Delivered) -> bool:
        return self.newest[one.id] == one.tag


class Member:
    def __init__(
        self,
        name: str,
        group: str,
        partition: int,
        *,
        key: UUID,
        addresses: Sequence[str],
        connect: Callable[[str], GroupPort],
        notes: GroupMemory | GroupWriter,
        clock: Clock,
        pick: random.Random,
        habits: Callable[[], Habits],
        life: str = "",
        on_join: Callable[[str, int], None] = lambda holder, made_at: None,
    ) -> None:
        """`habits` is asked before each delivery is worked at. `life`: of the process, so that holders have names of their
        own. `on_join` gets each holder, and the id of the entry that made the group that it joined."""
        self.name, self.group, self.partition = name, group, partition
        self.trouble = ""
        """Why its last stream has ended."""
        self._key = key
        self._addresses = list(addresses)
        self._connect = connect
        self._ports: dict[str, GroupPort] = {}
        self._notes = notes
        self._clock = clock
        self._pick = pick
        self._habits = habits
        self._life = life
        self._streams = 0
        self._on_join = on_join
        self._made_at: int | None = None
        """Of the group that it joined last."""
        self._old: list[Delivered] = []
        """What it still has of streams that have ended."""

    async def run(self) -> None:
        """Until it is cancelled: one stream after the other."""
        while True:
            pause = 0.05
            try:
                await self._attend()
            except Displaced as error:  # else two of a name would take each other's place for ever
                self.trouble, pause = str(error), 2.0
            except (WaltzError, OSError) as error:
                self.trouble = f"{type(error).__name__}: {error}"
            await asyncio.sleep(pause * (0.5 + self._pick.random()))

    def _port(self, address: str) -> GroupPort:
        if address not in self._ports:
            self._ports[address] = self._connect(address)
        return self._ports[address]

    async def _owner(self) -> tuple[GroupPort, int] | None:
        topology = await self._port(self._pick.choice(self._addresses)).locate()
        place = topology.places[self.partition]
        return None if place.address is None else (self._port(place.address), place.generation)

    async def _attend(self) -> None:
        found = await self._owner()
        if found is None:
            return
        port, generation = found
        self._streams += 1
        link = port.attend()
        stream = _Stream(f"{self.name}{self._life}/{self.partition}#{self._streams}", link)
        working: asyncio.Task[None] | None = None
        try:
            room = self._habits().room
            await link.send([JoinRequest(self._key, self.partition, generation, self.group, self.name, room)])
            working = asyncio.create_task(self._work(stream))
            await self._receive(stream, working)
        finally:
            if working is not None:
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)
            link.cancel()
            self._old = [*self._old, *stream.held][-20:]

    async def _receive(self, stream: _Stream, working: asyncio.Task[None]) -> None:
        while True:
            receiving = asyncio.ensure_future(stream.link.receive())
            try:
                await asyncio.wait((receiving, working), return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():
                    working.result()
                    return
                frames = receiving.result()
            finally:
                receiving.cancel()
                with suppress(asyncio.CancelledError, WaltzError):
                    await receiving
            if frames is None:
                return
            for frame in frames:
                self._take(stream, frame)

    def _take(self, stream: _Stream, frame: object) -> None:
        match frame:
            case Joined():
                stream.epoch = frame.epoch
                if frame.made_at != self._made_at:  # another group of the name: epochs begin again
                    self._old, self._made_at = [], frame.made_at
                self._on_join(stream.holder, frame.made_at)
            case Deliveries():
                for given in _given(frame, stream.holder, self.partition, self._clock):
                    self._notes.delivered(given)
                    stream.held.append(given)
                    stream.newest[given.id] = given.tag
                stream.changed.set()
            case AckResult():
                words = stream.words.pop(frame.number, [])
                answer = _answer(frame, len(words))
                for one in words:
                    one.answer, one.returned = answer, self._clock()
                    if answer:
                        self._notes.answered(one)
                stream.answered[frame.number] = words
            case AcksDurable():
                for number in [number for number in stream.answered if number <= frame.number]:
                    for word in stream.answered.pop(number):
                        if word.answer in ("taken", "done"):
                            word.is_kept = True
                            self._notes.kept(word)
            case Dismissed():
                raise frame.error
            case _:
                pass

    async def _work(self, stream: _Stream) -> None:
        """Returns when it leaves, in order or not."""
        pick = self._pick
        while True:
            stream.changed.clear()
            if not stream.held:
                await stream.changed.wait()
                continue
            habits = self._habits()
            dice = pick.randrange(100)
            await asyncio.sleep(habits.think_seconds * pick.random() * pick.choice((0, 0, 1, 1, 1, 5)))
            if not stream.held:
                continue
            one = stream.held.pop(pick.randrange(len(stream.held)) if pick.random() < 0.3 else 0)
            act = ""
            for share, name in (
                (habits.forget, "forget"),
                (habits.hang, "hang"),
                (habits.cut, "cut"),
                (habits.leave, "leave"),
            ):
                if 0 <= dice < share:
                    act = name
                dice -= share
            if act == "hang":
                await asyncio.sleep(habits.hang_seconds * (0.5 + pick.random()))
            elif act == "cut":
                return
            elif act == "leave":
                await stream.link.send([Leave()])
                return
            if act != "forget":
                verb = "nack" if 0 <= dice < habits.nack else "reject" if 0 <= dice - habits.nack < habits.reject else "ack"
                await self._say(stream, self._together(stream, one) if verb == "ack" else [one], verb)
            mine = {held.id for held in stream.held}
            for old in [old for old in self._old if old.id in mine or pick.random() < 0.05]:
                self._old.remove(old)
                await self._say(stream, [old], "ack")

    def _together(self, stream: _Stream, one: Delivered) -> list[Delivered]:
        """Sometimes with what lies behind it, in one word. One that it was given again goes by itself, even if it no longer
        holds the later delivery: the tag of a word is the highest of all, and would settle that one, too."""
        found = [one]
        while self._pick.random() < 0.5 and stream.is_newest(one):
            behind = [
                held
                for held in stream.held
                if held.id == found[-1].id + 1 and held.epoch == one.epoch and stream.is_newest(held)
            ]
            if not behind:
                break
            stream.held.remove(behind[0])
            found.append(behind[0])
        return found

    async def _say(self, stream: _Stream, deliveries: list[Delivered], verb: str) -> None:
        stream.number += 1
        tag, words = max(one.tag for one in deliveries), list[Said]()
        for one in deliveries:
            number = f"{stream.holder}.{next(_counter)}"
            words.append(
                Said(self._clock(), number, stream.holder, self.partition, one.epoch, one.tag, one.id, verb, stream.epoch)
            )
            self._notes.said(words[-1])
        stream.words[stream.number] = words
        await stream.link.send(
            [
                Ack(
                    number=stream.number,
                    verb=VERBS[verb],
                    epoch=deliveries[0].epoch,
                    tag=tag,
                    firsts=np.array([deliveries[0].id], np.int64),
                    lasts=np.array([deliveries[-1].id], np.int64),
                    reason="" if verb == "ack" else "it did not work",
                )
            ]
        )


class WitnessedStream:
    """The stream of a member that is the library, with all that passes written down: what is said before it goes out."""

    def __init__(
        self, inner: AttendPort, notes_of: Callable[[str], GroupWriter], clock: Clock, name: Callable[[str, int], str]
    ) -> None:
        """`notes_of`: where what is seen of a group is written. `name`: of a holder, from its group and partition."""
        self._inner = inner
        self._notes_of = notes_of
        self._clock = clock
        self._name = name
        self._holder, self._partition, self._epoch = "", 0, 0
        self._words: dict[int, list[Said]] = {}
        self._answered: dict[int, list[Said]] = {}

    async def send(self, frames: Sequence[MemberFrame]) -> None:
        for frame in frames:
            if isinstance(frame, JoinRequest):
                self._notes, self._partition = self._notes_of(frame.group), frame.partition
                self._holder = self._name(frame.group, frame.partition)
            elif isinstance(frame, Ack) and frame.verb in _NAMES:
                self._words[frame.number] = [self._said(frame, id) for id in _ids(frame)]
        await self._inner.send(frames)

    def _said(self, frame: Ack, id: int) -> Said:
        number, verb = f"{self._holder}.{next(_counter)}", _NAMES[frame.verb]
        word = Said(self._clock(), number, self._holder, self._partition, frame.epoch, frame.tag, id, verb, self._epoch)
        self._notes.said(word)
        return word

    async def receive(self) -> Sequence[DeliveryFrame] | None:
        frames = await self._inner.receive()
        for frame in frames or ():
            match frame:
                case Joined():
                    self._epoch = frame.epoch
                case Deliveries():
                    for given in _given(frame, self._holder, self._partition, self._clock):
                        self._notes.delivered(given)
                case AckResult() if frame.number in self._words:
                    words = self._answered[frame.number] = self._words.pop(frame.number)
                    answer = _answer(frame, len(words))
                    for word in words:
                        word.answer, word.returned = answer, self._clock()
                        if answer:
                            self._notes.answered(word)
                case AcksDurable():
                    for number in [number for number in self._answered if number <= frame.number]:
                        for word in self._answered.pop(number):
                            if word.answer in ("taken", "done"):
                                self._notes.kept(word)
                case _:
                    pass
        return frames

    def cancel(self) -> None:
        self._inner.cancel()


def _ids(said: Ack) -> list[int]:
    stretches = zip(said.firsts.tolist(), said.lasts.tolist(), strict=True)
    return [id for first, last in stretches for id in range(first, last + 1)]


def _given(frame: Deliveries, holder: str, partition: int, clock: Clock) -> list[Delivered]:
    at, found = 0, list[Delivered]()
    columns = zip(frame.ids.tolist(), frame.attempts.tolist(), frame.headers.tolist(), frame.lengths.tolist(), strict=True)
    for id, attempt, header, length in columns:
        key = payload_key(bytes(frame.payloads[at : at + length]))
        at += length
        found.append(Delivered(clock(), holder, partition, frame.epoch, frame.tag, id, attempt, key, header, length))
    return found


def _answer(answer: AckResult, count: int) -> str:
    """What all of them are; empty where they are not all the same."""
    if answer.is_old:
        return "old"
    numbers = {name: getattr(answer, name) for name in ("taken", "done", "late", "unknown")}
    return next((name for name, number in numbers.items() if number == count), "")
