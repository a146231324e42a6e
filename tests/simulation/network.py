"""The ways between the lives of a simulation: messages take their time, keep their order, wait while a way is cut, and are
lost only together with their connection, as with TCP.

Between two lives there is one connection at a time. It breaks when one of them ends, when somebody breaks it, or when one
end has heard nothing of the other for as long as a keep-alive lasts; what is on its way then is lost, and each end learns
of it by itself, when it can. A new one is made by the next call, if there is anybody to answer.

Everything that is said goes through a `Stream`: frames one way, frames the other way, and whichever end comes first.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from tests.simulation.loop import Life, SimLoop
from waltzd.errors import CannotConnect, WaltzError
from waltzd.server.session.change_signal import ChangeSignal

FRAMES_MAX = 4
"""How many messages of a stream are on their way, each way, before the sender waits."""
Serve: TypeAlias = Callable[["Stream"], Coroutine[Any, Any, None]]


class Network:
    def __init__(
        self,
        loop: SimLoop,
        seed: str,
        *,
        keep_alive_seconds: float,
        say: Callable[[str, str], None],
        on_mistake: Callable[[BaseException], None],
    ) -> None:
        """`keep_alive_seconds`: how long an end hears nothing before it takes the connection for broken."""
        self.loop = loop
        self.say = say
        self.on_mistake = on_mistake
        self.keep_alive_seconds = keep_alive_seconds
        self.messages = 0
        self.watched: dict[str, tuple[int, Callable[[], None]]] = {}
        """By receiver: what happens instead of the delivery of its n-th message from now on."""
        self.on_event: Callable[[str], None] = lambda name: None
        """Called with the name of the process that a message reaches, when all that came before has had its effect."""
        self._pick = random.Random(seed)
        self._cut: dict[tuple[str, str], None] = {}
        self._slow: dict[str, float] = {}
        self._refusing: dict[str, None] = {}
        self._lives: dict[str, Life] = {}
        self._connections: dict[tuple[str, str], Connection] = {}

    # -- who is there

    def joined(self, life: Life) -> None:
        self._lives[life.name] = life

    def left(self, life: Life) -> None:
        """The life is over: its system tells every process that it was connected to."""
        if self._lives.get(life.name) is life:
            del self._lives[life.name]
        for connection in [one for one in self._connections.values() if life in one.ends]:
            connection.break_off(f"{life.name} has gone")

    def find(self, name: str) -> Life | None:
        return self._lives.get(name)

    # -- what happens to ways

    def cut(self, source: str, target: str) -> None:
        """What is sent this way waits; the other way stays open."""
        self._cut[source, target] = None

    def mend(self, source: str, target: str) -> None:
        if (source, target) in self._cut:
            del self._cut[source, target]
            for connection in list(self._connections.values()):
                connection.mended(source, target)

    def mend_all(self) -> None:
        for source, target in list(self._cut):
            self.mend(source, target)
        self._slow.clear()
        self._refusing.clear()

    def slow_down(self, name: str, seconds: float) -> None:
        """Messages to this one take up to so much longer; 0 for no longer."""
        self._slow[name] = seconds

    def is_slow(self, name: str) -> bool:
        return self._slow.get(name, 0.0) > 0

    def refuse(self, name: str) -> None:
        """Its connections break, and new ones to it are refused, though the process lives: a rule of a firewall."""
        self._refusing[name] = None
        self.break_connections(name)

    def accept(self, name: str) -> None:
        self._refusing.pop(name, None)

    def break_connections(self, name: str) -> None:
        for connection in [one for one in self._connections.values() if name in (one.ends[0].name, one.ends[1].name)]:
            connection.break_off("it was reset")

    def is_open(self, source: str, target: str) -> bool:
        return (source, target) not in self._cut

    def seconds(self, target: str) -> float:
        """How long one message takes."""
        pick = self._pick.random()
        seconds = 0.0002 + 0.0006 * pick
        if pick > 0.99:
            seconds += self._pick.random() * 0.05  # sent again
        return seconds + (self._slow[target] * self._pick.random() if target in self._slow else 0.0)

    # -- connections

    def connection(self, caller: Life, name: str) -> Connection:
        """Raises `CannotConnect` at once where nobody listens; where a way is cut, silence is all that comes."""
        found = self._connections.get((caller.name, name))
        if found is not None and found.ends[0] is caller:
            return found
        life = None if name in self._refusing else self._lives.get(name)
        if life is None and self.is_open(caller.name, name) and self.is_open(name, caller.name):
            raise CannotConnect(f"nobody listens at {name}")
        connection = Connection(self, caller, life or Life(name))
        self._connections[caller.name, name] = connection
        return connection

    def forget(self, connection: Connection) -> None:
        key = (connection.ends[0].name, connection.ends[1].name)
        if self._connections.get(key) is connection:
            del self._connections[key]

    def strikes(self, name: str) -> bool:
        """Whether something else happens instead of this message."""
        self.messages += 1
        if name not in self.watched:
            return False
        left, act = self.watched[name]
        if left > 1:
            self.watched[name] = (left - 1, act)
            return False
        del self.watched[name]
        act()
        return True


class Connection:
    """`ends`: who called, and who was called."""

    def __init__(self, network: Network, caller: Life, called: Life) -> None:
        self.ends = (caller, called)
        self.is_over = False
        self._network = network
        self._due = {caller.name: 0.0, called.name: 0.0}
        self._held: dict[str, list[tuple[Life, Callable[..., object], tuple[object, ...]]]] = {}
        self._streams: dict[Stream, None] = {}
        self._silence: asyncio.TimerHandle | None = None
        self._watch_silence()

    # -- silence

    def _watch_silence(self) -> None:
        seconds = self._network.keep_alive_seconds / 3
        self._silence = self._network.loop.after(seconds, None, self._listen, self._network.loop.now)

    def _listen(self, silent_since: float) -> None:
        """Only a way that is cut, and a life that does not run, is silent for so long."""
        (a, b), network = self.ends, self._network
        is_heard = network.is_open(a.name, b.name) and network.is_open(b.name, a.name) and not a.is_still and not b.is_still
        now = network.loop.now
        if is_heard:
            silent_since = now
        elif now - silent_since >= network.keep_alive_seconds:
            self.break_off("nothing was heard for too long")
            return
        self._silence = network.loop.after(network.keep_alive_seconds / 3, None, self._listen, silent_since)

    def break_off(self, why: str) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._network.forget(self)
        self._network.say("network", f"{self.ends[0].name} and {self.ends[1].name} are not connected any more: {why}")
        self._held.clear()
        if self._silence is not None:
            self._silence.cancel()
        for stream in list(self._streams):
            stream.lose()

    # -- messages

    def post(self, source: Life, target: Life, deliver: Callable[..., object], *arguments: object) -> None:
        """Let this be done at the target, behind everything that was posted before."""
        if self.is_over:
            return
        if self._held.get(target.name) or not self._network.is_open(source.name, target.name):
            self._held.setdefault(target.name, []).append((target, deliver, arguments))
            return
        loop = self._network.loop
        due = max(self._due[target.name], loop.now + self._network.seconds(target.name))
        self._due[target.name] = due
        loop.after(due - loop.now, target, self._arrive, target, deliver, arguments)

    def _arrive(self, target: Life, deliver: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self._network.on_event(target.name)
        if not self.is_over and not self._network.strikes(target.name):
            deliver(*arguments)

    def mended(self, source: str, target: str) -> None:
        """What was held back is sent again."""
        if {source, target} == {end.name for end in self.ends}:
            for life, deliver, arguments in self._held.pop(target, []):
                other = self.ends[1] if life is self.ends[0] else self.ends[0]
                self.post(other, life, deliver, *arguments)

    # -- streams

    def open(self, serve: Callable[[Life], Serve | None], *, lingers: bool = False) -> Stream:
        """`serve` finds, at the other end and when it is asked there, who takes the stream. `lingers`: what it does there
        goes on when the caller is gone; it learns of that when it looks at the stream."""
        stream = Stream(self, *self.ends, lingers=lingers)
        self._streams[stream] = None
        stream.begin(serve)
        return stream

    def closed(self, stream: Stream) -> None:
        self._streams.pop(stream, None)


class End:
    """One end of a stream."""

    def __init__(self, stream: Stream, life: Life) -> None:
        self.life = life
        self.signal = ChangeSignal()
        self.is_over = False
        """The other end has no more to say, or nothing will come any more."""
        self.error: WaltzError | None = None
        self._stream = stream
        self._arrived: deque[Any] = deque()
        self._on_way = 0
        self._is_waiting = False
        self._taker: Callable[[Any], object] | None = None
        self._mistake: Exception | None = None

    @property
    def other(self) -> End:
        return self._stream.called if self is self._stream.caller else self._stream.caller

    @property
    def may_post(self) -> bool:
        return self.other._on_way < FRAMES_MAX and not self.is_over

    def hear(self, taker: Callable[[Any], object]) -> None:
        """Frames go to `taker` as they come, unless others wait to be received, or it returns False."""
        self._taker = taker

    async def send(self, frame: object) -> None:
        """Waits while too much is on its way; raises when the stream is over."""
        while self.other._on_way >= FRAMES_MAX and not self.is_over:
            self._is_waiting = True
            await self.signal.wait(self.signal.version)
        self._is_waiting = False
        if self.is_over:
            raise self.error or CannotConnect(f"{self.other.life.name} has ended the stream")
        self.post(frame)

    def post(self, frame: object) -> None:
        self.other._on_way += 1
        self._stream.connection.post(self.life, self.other.life, self.other._take, frame)

    def _take(self, frame: object) -> None:
        if self._taker is not None and not self._arrived and not self.is_over:
            try:
                is_taken = self._taker(frame) is not False
            except Exception as mistake:  # noqa: BLE001  `receive` raises it
                self._mistake, self._taker, is_taken = mistake, None, True
                self.signal.notify()
            if is_taken:
                self._taken()
                return
        self._arrived.append(frame)
        self.signal.notify()

    async def receive(self) -> Any:
        """The next frame, or None at the end; raises what ended it, behind all frames."""
        while not self._arrived:
            if self._mistake is not None:
                raise self._mistake
            if self.is_over:
                if self.error is not None:
                    raise self.error
                return None
            await self.signal.wait(self.signal.version)
        self._taken()
        return self._arrived.popleft()

    def _taken(self) -> None:
        self._on_way -= 1
        if self.other._is_waiting:  # credit is given back like any other message
            self._stream.connection.post(self.life, self.other.life, self.other.signal.notify)

    def finish(self, error: WaltzError) -> None:
        """Tell the other end, behind everything that was sent, that this is the end."""
        self._stream.connection.post(self.life, self.other.life, self.other.end, error)

    def end(self, error: WaltzError | None = None) -> None:
        """The first reason counts."""
        if not self.is_over:
            self.is_over, self.error = True, error
            self.signal.notify()


class Stream:
    def __init__(self, connection: Connection, caller: Life, called: Life, *, lingers: bool) -> None:
        self.connection = connection
        self._lingers = lingers
        self.caller = End(self, caller)
        self.called = End(self, called)
        self._task: asyncio.Task[None] | None = None

    def begin(self, serve: Callable[[Life], Serve | None]) -> None:
        self.connection.post(self.caller.life, self.called.life, self._accept, serve)

    def _accept(self, serve: Callable[[Life], Serve | None]) -> None:
        life = self.called.life
        found = serve(life)
        if found is None:
            self.connection.break_off(f"nobody listens at {life.name}")
            return
        loop = self.connection._network.loop
        self._task = loop.run_in(life, self._serve(found), f"stream of {self.caller.life.name} at {life.name}")

    async def _serve(self, serve: Serve) -> None:
        error: WaltzError | None = None
        try:
            await serve(self)
        except WaltzError as failed:
            error = failed
        except asyncio.CancelledError:
            error = CannotConnect("the stream was given up")
        except Exception as mistake:
            self.connection._network.on_mistake(mistake)
            raise
        self.called.end()
        self.connection.post(self.called.life, self.caller.life, self._ended, error)

    def _ended(self, error: WaltzError | None) -> None:
        self.caller.end(error)
        self.connection.closed(self)

    def cancel(self) -> None:
        """The caller gives up: what it has not been told it will not be told."""
        if not self.caller.is_over:
            self.caller.end(CannotConnect("the stream was given up here"))
            self.connection.post(self.caller.life, self.called.life, self._cancelled)

    def _cancelled(self) -> None:
        """Until here the connection knows the stream: when it breaks first, who serves the stream learns of that."""
        self.connection.closed(self)
        self.called.end()
        if self._task is not None and not self._lingers:
            self._task.cancel()

    def lose(self) -> None:
        """The connection is broken: each end learns it in its own time."""
        loop = self.connection._network.loop
        loop.after(
            0.0, self.caller.life, self.caller.end, CannotConnect(f"the connection to {self.called.life.name} was lost")
        )
        loop.after(0.0, self.called.life, self._cancelled)
