"""How commands that started something are told to end: whatever the signal is, it arrives as Ctrl-C does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ending:
    """Whether somebody told this command to end. What was under way then may have ended by an error of its own."""

    was_told = False


@contextmanager
def ending_in_order(hear: Callable[[bool], object] | None = None) -> Iterator[Ending]:
    """To be told to end, and a terminal that goes away, are the same as Ctrl-C.

    With `hear`, only the first time is: nothing that is being cleared up is left half done, and who was told once ends.
    It is called each time, with whether this is the first one, to end at once what nobody has to wait for."""
    ending = Ending()

    def told(_number: int, _frame: FrameType | None) -> None:
        is_first, ending.was_told = not ending.was_told, True
        if hear is not None:
            hear(is_first)
        if is_first or hear is None:
            raise KeyboardInterrupt

    # Ctrl-C, too: a shell without job control lets its background programs ignore it.
    before = {number: signal.signal(number, told) for number in NUMBERS}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if ending.was_told and hear is not None else handler)
