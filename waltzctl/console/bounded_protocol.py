"""Limits for the connections of browsers: by itself, uvicorn waits without limit for the rest of a request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 10.0
"""Seconds within which a request is here, head and body, from the connection or the answer before it."""
CONNECTIONS_MAX = 256
"""Further ones are closed at once. A browser holds six, one of them for the page that it follows."""


class BoundedProtocol(H11Protocol):
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            transport.abort()
        self._wait_for_request()

    def _wait_for_request(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
