"""Handling of signals: SIGINT, SIGTERM and SIGHUP all end a command as Ctrl-C does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


EXIT_INTERRUPTED = 130


class Interrupted(typer.Abort):
    """Ctrl-C, with a message on the state of the work."""


class Ending:
    """Record of a signal. After it, an error of the work may be a consequence of the signal."""

    was_signalled = False
    """True once a signal arrived."""


@contextmanager
def ending_in_order(on_signal: Callable[[bool], object] | None = None) -> Iterator[Ending]:
    """Treat SIGTERM, and SIGHUP when the terminal goes away, as Ctrl-C while the body runs.

    With `on_signal`, only the first signal interrupts the body, so that the clean-up that follows is not interrupted.
    `on_signal` is called for each signal, with True for the first one."""
    ending = Ending()

    def handle(number: int, frame: FrameType | None) -> None:
        is_first, ending.was_signalled = not ending.was_signalled, True
        if on_signal is not None:
            on_signal(is_first)
        if is_first or on_signal is None:
            signal.default_int_handler(number, frame)

    # SIGINT is set as well: a shell without job control starts background programs with SIGINT ignored.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, handle)}
    for number in (signal.SIGTERM, signal.SIGHUP):  # raised as SIGINT, which code that must not be disturbed replaces
        before[number] = signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield ending
    finally:
        if on_signal is not None and ending.was_signalled:
            ignore_signals()  # a second signal would be reported as another interruption
        else:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def left_to_the_loop() -> Iterator[None]:
    """Inside `ending_in_order`, let asyncio handle Ctrl-C while a loop runs: it cancels the main task.

    A KeyboardInterrupt raised inside a callback would be taken for an error of the connection that is read there, and the
    main task would continue to wait."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Run a change on an event loop; on a signal let it record its outcome, then raise `Interrupted` with this message.

    asyncio handles Ctrl-C: it cancels the main task, whose clean-up can still talk to the cluster. SIGTERM and SIGHUP act
    as Ctrl-C, unless they were ignored at the start (`nohup`)."""
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler)}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(message) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """Ignore further signals while the program ends: they would print a traceback."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)
