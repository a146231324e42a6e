"""How commands that started something are told to end: whatever the signal is, it arrives as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


EXIT_INTERRUPTED = 130


class Interrupted(typer.Abort):
    """Ctrl-C, with a sentence on what became of the work."""


class Ending:
    """Whether this command was told to end. What was under way then may have ended by an error of its own."""

    was_told = False


@contextmanager
def ending_in_order(hear: Callable[[bool], object] | None = None) -> Iterator[Ending]:
    """To be told to end, and a terminal that goes away, are the same as Ctrl-C.

    With `hear`, only the first signal ends the command, and the program with it: nothing that is being cleared up is left
    half done. `hear` is called for each, with whether it is the first one, to end at once what needs no waiting for."""
    ending = Ending()

    def told(number: int, frame: FrameType | None) -> None:
        is_first, ending.was_told = not ending.was_told, True
        if hear is not None:
            hear(is_first)
        if is_first or hear is None:
            signal.default_int_handler(number, frame)

    # Ctrl-C, too: a shell without job control lets its background programs ignore it.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, told)}
    for number in (
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # through Ctrl-C, which others keep away while they must not be disturbed
        before[number] = signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield ending
    finally:
        if hear is not None and ending.was_told:
            deaf()  # one that comes a moment later would be told as another interruption
        else:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def left_to_the_loop() -> Iterator[None]:
    """Inside `ending_in_order`, around work on a loop: Ctrl-C cancels the work, as asyncio does it. Raised in the middle of
    a callback it would be taken for an error of the connection that was just being read, and the work would wait on."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def interruptible(said: str) -> Iterator[None]:
    """Around a change that runs on a loop of its own: when it is told to end, it writes down how it ended, and says this.

    Ctrl-C is left to the loop, which cancels what runs, so that whatever has to be said to the cluster still is. SIGTERM is
    the same, and a terminal that goes away, unless the command is to go on without one (`nohup`)."""
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler)}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(said) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def deaf() -> None:
    """Ignore further signals while the program ends: they would show a traceback."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def silence_stdout() -> None:
    """The reader of standard output is gone: not even the flush at exit may write there."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
