"""What every client of one of our gRPC services has: a channel, a deadline for each call, errors that keep their class."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, ClassVar, Self
from uuid import UUID

import grpc.aio

from waltzd.errors import CannotConnect, TlsMismatch, WaltzError, WrongStorage
from waltzd.role import Role
from waltzd.rpc import INSTANCE_KEY, STORAGE_KEY, doubt, error_of, open_channel, prove
from waltzd.tls import Tls, speaks_tls


class Caller:
    service: ClassVar[Any]
    """The generated stub."""
    peer: ClassVar[Role]
    """Who must answer, when there are certificates."""

    def __init__(
        self, address: str, *, seconds: float, tls: Tls | None, name: str | None = None, instance: UUID | None = None
    ) -> None:
        """With `tls`, whoever answers must have the role `peer` in our cluster; with a `name`, be the one of that name.
        `instance`: of a storage, the very process that is meant."""
        self.address = address
        self._who = f"the {self.peer} {name} at {address}" if name is not None else f"the {self.peer} at {address}"
        self._seconds = seconds
        self._channel = open_channel(address, tls=tls, peer=self.peer, name=name)
        self._stub: Any = self.service(self._channel)
        self._may_want_tls = tls is None
        """As long as nobody has answered in plain text."""
        self._meant: list[tuple[str, bytes]] = []
        if self.peer is Role.STORAGE:  # also where there are no certificates
            self._meant += [(STORAGE_KEY, name.encode())] if name is not None else []
            self._meant += [(INSTANCE_KEY, instance.bytes)] if instance is not None else []

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, method: Any, request: Any, seconds: float | None = None) -> Any:
        limit = self._seconds if seconds is None else seconds
        await prove(self._channel, limit)
        try:
            answer = await method(request, timeout=limit, metadata=self._meant)
        except grpc.aio.AioRpcError as error:
            raise await self._lost(error, error_of(error, who=self._who, seconds=limit)) from error
        self._may_want_tls = False
        return answer

    async def _lost(self, cause: grpc.aio.AioRpcError, error: WaltzError) -> WaltzError:
        if isinstance(error, CannotConnect):
            doubt(self._channel)
            # Why there is no connection, gRPC tells in words of its own: the address is asked once more.
            if self._may_want_tls and cause.code() is grpc.StatusCode.UNAVAILABLE and await speaks_tls(self.address):
                return TlsMismatch(f"{self.address} speaks TLS, and no certificate was given")
        else:
            self._may_want_tls = False
        if isinstance(error, WrongStorage):  # it does not know by which address it was reached
            return WrongStorage(f"{self.address}: {error.message}")
        return error

    async def _stream(self, method: Any, request: Any) -> AsyncGenerator[Any, None]:
        """To be closed by whoever may stop early (`aclosing`): a call that nobody reads to its end would stay open, and a
        connection carries a thousand of them."""
        await prove(self._channel, self._seconds)
        call = method(request, metadata=self._meant)
        try:
            async for message in call:
                self._may_want_tls = False
                yield message
        except grpc.aio.AioRpcError as error:
            raise await self._lost(error, error_of(error)) from error
        finally:
            call.cancel()
