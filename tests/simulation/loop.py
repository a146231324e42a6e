"""One event loop for many processes, with a clock that moves only when all of them wait.

A `Life` is one process from its start to its end. Everything that runs belongs to the life in whose context it was begun;
timers and tasks inherit it. So a life can be stopped for a while like a process that gets SIGSTOP, with all its timers
firing late, and it can end like one that gets SIGKILL: nothing of it ever runs again, no handler, no `finally`. Its clock
may be ahead of the true one and run faster or slower.

The same work in the same order happens in every run: tasks and futures have their number as hash, so a set of them is
walked in the same order in every process, and what is due at the same moment runs in the order in which it was asked for.

A timer never runs before its time by the clock of its life, however that clock is rounded. A run whose clock stands still
for `TURNS_MAX` turns of the loop ends with `Standstill`, which names the callbacks that go round.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections.abc import Callable, Coroutine
from math import inf, nextafter
from typing import Any, TypeVar

T = TypeVar("T")

TURNS_MAX = 5_000
"""Turns of the loop at one instant of virtual time. Sound runs take at most some hundreds."""
ROUND_TURNS = 10
"""Turns beyond that of which the story names the callbacks."""


class Deadlock(AssertionError):
    """Every process waits, and no timer is set."""


class Endless(AssertionError):
    """The run has taken more steps than a run that makes progress."""


class Standstill(AssertionError):
    """Callbacks go round and round, and no virtual time passes."""


class Life:
    def __init__(self, name: str, *, ahead: float = 0.0, rate: float = 1.0) -> None:
        """`ahead` and `rate`: how its clock differs from the true one."""
        self.name = name
        self.ahead = ahead
        self.rate = rate
        self.is_paused = False
        self.is_over = False
        self.halted_at: float | None = None
        """The true time since when its clock stands still; None while it runs."""
        self.parked: list[asyncio.Handle] = []
        """What would have run by now."""
        self.context = contextvars.copy_context()
        self.context.run(LIFE.set, self)

    def true_time(self, when: float) -> float:
        """The first true time at which its clock shows `when`, or more: however it is rounded, no timer runs early."""
        true = (when - self.ahead) / self.rate
        while true * self.rate + self.ahead < when:
            true = nextafter(true, inf)
        return true

    @property
    def is_still(self) -> bool:
        return self.is_paused or self.is_over


LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)


class _Numbered(asyncio.Future):  # type: ignore[type-arg]
    """Its hash is the number of those in this loop that were asked for theirs before."""

    _number: int

    def __hash__(self) -> int:
        try:
            return self._number
        except AttributeError:
            loop = self.get_loop()
            assert isinstance(loop, SimLoop)
            loop.hashes += 1
            self._number = loop.hashes
            return self._number


class _Task(asyncio.Task):  # type: ignore[type-arg]
    _number: int
    __hash__ = _Numbered.__hash__


class _Handle(asyncio.Handle):
    """Without what is there for debugging: most of what a simulation does is to make these."""

    def __init__(self, callback: Any, args: Any, loop: SimLoop, context: contextvars.Context | None) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class _Timer(asyncio.TimerHandle):
    """Without what is there for debugging, as `_Handle`."""

    def __init__(self, when: float, callback: Any, args: Any, loop: SimLoop, context: contextvars.Context | None) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = when
        self._scheduled = True

    def cancel(self) -> None:
        if not self._cancelled:
            self._loop._timer_handle_cancelled(self)
            self._cancelled = True
            self._callback, self._args = None, ()  # what they hold may go


class _OwnTimer(_Timer):
    """Set by a life, by its own clock; `when()` is the time that this clock shows."""


class _NoSelector:
    """Nothing comes from outside."""

    def select(self, timeout: float | None = None) -> list[Any]:
        return []

    def close(self) -> None:
        return None


class SimLoop(asyncio.BaseEventLoop):
    """The loop of a simulation. `now` is the true time."""

    _ready: Any
    _stopping: bool

    def __init__(self, *, steps_max: int) -> None:
        super().__init__()
        self._selector = _NoSelector()
        self.now = 0.0
        self.steps = 0
        self.steps_max = steps_max
        self.turns = 0
        """Turns of the loop since `now` changed last."""
        self._round: dict[str, None] = {}
        self.hashes = 0
        self._set_timers = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        """Those of the same moment in the order in which they were set."""
        self._dropped = 0
        self.set_task_factory(self._make_task)

    # -- what is made here

    def create_future(self) -> asyncio.Future[Any]:
        return _Numbered(loop=self)

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **about: Any) -> asyncio.Task[Any]:
        about["name"] = about.get("name") or "task"
        return _Task(work, loop=loop, **about)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    # -- time

    def time(self) -> float:
        life = LIFE.get()
        return self.now if life is None else self.now * life.rate + life.ahead

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        life = LIFE.get() if context is None else context.get(LIFE)
        if life is None:
            return self._set(when, callback, args, context)
        timer = _OwnTimer(when, callback, args, self, context)
        self._push(life.true_time(when), timer)
        return timer

    def _set(self, when: float, callback: Any, args: Any, context: Any) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        self._push(when, timer)
        return timer

    def _push(self, when: float, timer: asyncio.TimerHandle) -> None:
        self._set_timers += 1
        heapq.heappush(self._timers, (when, self._set_timers, timer))

    def after(
        self, seconds: float, life: Life | None, callback: Callable[..., object], *args: object
    ) -> asyncio.TimerHandle:
        """Of the true clock, on behalf of this life."""
        context = _OUTSIDE if life is None else life.context
        return self._set(self.now + seconds, callback, args, context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._dropped += 1
        if self._dropped > 200 and 2 * self._dropped > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._dropped = 0

    def _write_to_self(self) -> None:
        return None

    def _process_events(self, event_list: list[Any]) -> None:
        return None

    # -- the heart

    def _run_once(self) -> None:
        """Take turns until somebody stops the loop. A run has so many that what a turn costs by itself is felt."""
        ready = self._ready
        while True:
            timers = self._timers
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
                self._dropped -= 1
            if not ready and not self._stopping:
                if not timers:
                    raise Deadlock("everybody waits, and nothing will ever happen")
                if timers[0][0] > self.now:
                    self.now, self.turns = timers[0][0], 0
            while timers and timers[0][0] <= self.now:
                ready.append(heapq.heappop(timers)[2])
            self.turns += 1
            if self.turns > TURNS_MAX:
                self._look_at_standstill()
            self.steps += len(ready)
            if self.steps > self.steps_max:
                self.steps_max *= 10  # the end of it all still has to run
                raise Endless(f"{self.steps} steps were taken by second {self.now:.3f}")
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle._cancelled:
                    continue
                context = handle._context
                life = context.get(LIFE)
                if life is not None and (life.is_paused or life.is_over):
                    life.parked.append(handle)
                    continue
                try:
                    context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001  as every event loop does
                    told = {"message": f"exception in {handle!r}", "exception": error, "handle": handle}
                    self.call_exception_handler(told)
            if self._stopping:
                return

    def _look_at_standstill(self) -> None:
        """Name what runs in some turns beyond the limit, then end the run."""
        self._round.update((_told(handle), None) for handle in self._ready)
        if self.turns > TURNS_MAX + ROUND_TURNS:
            told, self.turns, self._round = "; ".join(self._round), 0, {}
            raise Standstill(f"no time passes at second {self.now:.6f}: the loop went round {TURNS_MAX} times with {told}")

    # -- lives

    def run_in(self, life: Life, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """A task that belongs to this life."""
        return self._make_task(self, work, name=name, context=life.context)

    def resume(self, life: Life) -> None:
        life.is_paused = False
        parked, life.parked = life.parked, []
        if life.halted_at is None:
            self._ready.extend(parked)
            return
        life.ahead -= (self.now - life.halted_at) * life.rate
        life.halted_at = None
        for handle in parked:
            if isinstance(handle, _OwnTimer) and handle.when() > self.now * life.rate + life.ahead:
                self._push(life.true_time(handle.when()), handle)
            else:
                self._ready.append(handle)
        for at, (_, number, timer) in enumerate(self._timers):
            if isinstance(timer, _OwnTimer) and timer._context.get(LIFE) is life:
                self._timers[at] = life.true_time(timer.when()), number, timer
        heapq.heapify(self._timers)


_OUTSIDE = contextvars.copy_context()


def _told(handle: asyncio.Handle) -> str:
    """Name what a handle runs, and whose it is: of a task the innermost line at which it waits."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    life = handle._context.get(LIFE)  # type: ignore[attr-defined]
    what = getattr(callback, "__qualname__", repr(callback))
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        work: Any = task.get_coro()
        while hasattr(inner := getattr(work, "cr_await", None), "cr_frame"):
            work = inner
        frame = getattr(work, "cr_frame", None)
        what = task.get_name() if frame is None else f"{work.__qualname__}, line {frame.f_lineno}"
    return f"{'nobody' if life is None else life.name}: {what}"


def run(loop: SimLoop, work: Coroutine[Any, Any, T], lives: Callable[[], list[Life]]) -> T:
    """Run it; afterwards everything that was left is cancelled, also what belongs to lives that are over."""
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.set_exception_handler(lambda loop, context: None)
        for life in lives():
            life.is_over = False
            loop.resume(life)
        _end_all(loop)
        asyncio.set_event_loop(None)
        loop.close()


def _end_all(loop: SimLoop) -> None:
    for _ in range(20):
        left = sorted(asyncio.all_tasks(loop), key=hash)
        if not left:
            return
        for task in left:
            task.cancel()
        try:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        except (Deadlock, Endless, Standstill):
            break
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
