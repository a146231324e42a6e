"""Whoever waits for longer than a moment says on standard error what for, once: silence looks like a tool that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import typer

from waltzctl.show.terminal import printable

MOMENT_SECONDS = 1.0


@asynccontextmanager
async def waiting_aloud(what: Callable[[], str]) -> AsyncIterator[None]:
    """`what` is asked when the moment is over; an empty sentence is not said."""

    async def say() -> None:
        await asyncio.sleep(MOMENT_SECONDS)
        sentence = what()
        if sentence:
            with suppress(OSError):  # a terminal that went away
                typer.echo(printable(f"{sentence} …"), err=True)

    saying = asyncio.create_task(say())
    try:
        yield
    finally:
        saying.cancel()
        with suppress(asyncio.CancelledError):
            await saying
