"""Calls within one process: request and result are handed over as they are.

The proxies and the services are those of the daemons; only gRPC between them is missing. Faults are injected in two
places: before a call reaches its host, and before an answer comes back. There a transport may wait, or raise the error
of a broken connection."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

from waltzd.wire.calls import Call, Transport
from waltzd.wire.servicer import Host, Origin, answered

R = TypeVar("R")


class LocalTransport(Transport):
    def __init__(self, origin: Origin | None = None) -> None:
        """Create a transport; `origin` is what a certificate would tell of the caller."""
        self._origin = origin or Origin()

    @abstractmethod
    async def _reach(self) -> Host:
        """Return the current host: it may have been restarted since the last call."""

    @abstractmethod
    async def _pass(self) -> None:
        """Let an answer come back."""

    async def _ask(self, call: Call[R], request: Any, seconds: float | None = None) -> R:
        value: R = await answered(await self._reach(), call, request, self._origin)
        await self._pass()
        return value

    async def _each(self, call: Call[R], request: Any) -> AsyncGenerator[R, None]:
        async with aclosing(answered(await self._reach(), call, request, self._origin)) as values:
            async for value in values:
                await self._pass()
                yield value
