"""The HTTP/1.1 port of a daemon (`http_listen`): metrics, liveness and readiness.

The port is read-only, has no secrets and does not authenticate callers. So everything about a caller is limited: the bytes
of a request, the time to send it and to read the response, and the number of connections; each page is made once at a
time. Every connection is one request. No response contains anything that a caller sent, and no request can end the daemon.
When all connections are in use, an idle one is closed for a new one.

A page of metrics can be long, so its text is made on a thread; its values are collected before, at one moment.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias

from waltzd.daemon import metrics
from waltzd.daemon.readiness import Unready
from waltzd.errors import WaltzError
from waltzd.errors.operations import PortInUse
from waltzd.protocol.address import Address
from waltzd.protocol.role import Role
from waltzd.wire.listening_port import ListeningPort

QUESTION_BYTES_MAX = 8 << 10
QUESTION_SECONDS = 5.0
ANSWER_SECONDS = 10.0
"""Limit for making a response, and again for sending it."""
CONNECTIONS_MAX = 64
"""Limit of open connections; a further connection closes an idle one."""
TEXT = "text/plain; charset=utf-8"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
log = logging.getLogger("waltz.http")
_FIRST_LINE = re.compile(r"([A-Z]{1,20}) (/[!-~]*) HTTP/1\.[01]")


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    body: bytes
    kind: str = TEXT

    def __post_init__(self) -> None:
        if not (self.kind.isascii() and self.kind.isprintable()):
            raise ValueError(f"{self.kind!r} is no value of a header")

    @classmethod
    def text(cls, status: int, *lines: str) -> Answer:
        return cls(status=status, body="".join(f"{line}\n" for line in lines).encode())

    def encode(self, *, is_head: bool) -> bytes:
        more = "Allow: GET, HEAD\r\n" if self.status == 405 else ""
        head = (
            f"HTTP/1.1 {self.status} {_REASONS[self.status]}\r\nContent-Type: {self.kind}\r\n"
            f"Content-Length: {len(self.body)}\r\nCache-Control: no-store\r\n{more}Connection: close\r\n\r\n"
        )
        return head.encode("ascii") + (b"" if is_head else self.body)


@dataclass(frozen=True)
class Question:
    method: str
    path: str
    accept: str
    """The header `Accept`."""


Page = Callable[[Question], Awaitable[Answer]]


def question_of(raw: bytes) -> Question | None:
    """Parse a request; return None if it is not HTTP/1."""
    first, *fields = raw.decode("latin-1").split("\r\n")
    found = _FIRST_LINE.fullmatch(first)
    if found is None:
        return None
    named = (field.partition(":") for field in fields if field)
    accepted = [value.strip() for name, _, value in named if name.lower() == "accept"]
    return Question(found[1], found[2].partition("?")[0], ", ".join(accepted))


@dataclass
class _Caller:
    host: str
    is_heard: bool = False
    """Whether the request has arrived; the response is then being made or sent."""


class HttpPort:
    def __init__(self, address: Address, pages: Mapping[str, Page], tls: ssl.SSLContext | None = None) -> None:
        """`pages`: the page for each path."""
        self.address = address
        self.failed = 0
        """Number of responses that failed because of a bug."""
        self._pages = {path: (page, asyncio.Lock()) for path, page in pages.items()}
        self._tls = tls
        self._port = ListeningPort(self._make_protocol, handshake_seconds=QUESTION_SECONDS)
        self._callers: dict[asyncio.Task[None], _Caller] = {}

    async def start(self) -> None:
        try:
            await self._port.open(self.address.host, self.address.port, self._tls)
        except OSError as error:
            raise PortInUse(f"cannot listen for HTTP on {self.address}: {error}") from error
        self.address = replace(self.address, port=self._port.number)

    def _make_protocol(self) -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=QUESTION_BYTES_MAX), self._accept)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._callers) >= CONNECTIONS_MAX:
            self._make_room()
        name = writer.get_extra_info("peername")
        caller = _Caller(str(name[0]) if name else "")
        task = asyncio.create_task(self._serve(caller, reader, writer), name=f"HTTP at {self.address}")
        self._callers[task] = caller
        task.add_done_callback(lambda done: self._end(done, writer))

    def _end(self, task: asyncio.Task[None], writer: asyncio.StreamWriter) -> None:
        self._callers.pop(task, None)
        if task.cancelled():  # perhaps before it began
            writer.transport.abort()

    def _make_room(self) -> None:
        """Close a connection without a request; among those, the oldest of the host with the most connections."""
        held = Counter(caller.host for caller in self._callers.values())
        task = min(self._callers, key=lambda one: (self._callers[one].is_heard, -held[self._callers[one].host]))
        del self._callers[task]
        task.cancel()

    async def _serve(self, caller: _Caller, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_taken = False
        try:
            found = await self._question(reader)
            caller.is_heard = True
            if found is not None:
                answer = await self._answer(found) if isinstance(found, Question) else found
                raw = answer.encode(is_head=isinstance(found, Question) and found.method == "HEAD")
                is_taken = await self._send(writer, raw)
        finally:
            if not is_taken:
                writer.transport.abort()

    @staticmethod
    async def _send(writer: asyncio.StreamWriter, raw: bytes) -> bool:
        """Send a response; return whether the caller has received all of it."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                writer.write(raw)
                writer.close()  # when everything is sent
                await writer.wait_closed()
        except OSError:  # TimeoutError is an OSError
            return False
        return True

    async def _question(self, reader: asyncio.StreamReader) -> Question | Answer | None:
        """Return the request, the response to an invalid one, or None if the caller has disconnected."""
        try:
            async with asyncio.timeout(QUESTION_SECONDS):
                raw = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return Answer.text(431, f"a question has at most {QUESTION_BYTES_MAX} bytes")
        except (asyncio.IncompleteReadError, OSError):  # TimeoutError is an OSError
            return None
        found = question_of(raw)
        if found is None:
            return Answer.text(400, "this port speaks HTTP/1.1")
        if found.method not in ("GET", "HEAD"):
            return Answer.text(405, "this port only reads: GET and HEAD")
        return found

    async def _answer(self, question: Question) -> Answer:
        page, one_at_a_time = self._pages.get(question.path, (None, None))
        if page is None or one_at_a_time is None:
            return Answer.text(404, f"there is nothing at this path; there is something at {', '.join(self._pages)}")
        try:
            async with asyncio.timeout(ANSWER_SECONDS), one_at_a_time:
                return await page(question)
        except TimeoutError:
            return Answer.text(503, f"no answer could be made within {ANSWER_SECONDS:.0f} seconds")
        except WaltzError as error:
            return Answer.text(503, *error.lines())
        except Exception:  # a request must not end the daemon
            self.failed += 1
            if self.failed.bit_count() == 1:  # nor fill its log
                log.exception("the page %s cannot be made, for the %d. time", question.path, self.failed)
            return Answer.text(500, "the answer could not be made because of a mistake in Waltz; its log says more")

    async def stop(self) -> None:
        """Close all connections at once: callers can retry."""
        self._port.close()
        callers = list(self._callers)
        for task in callers:
            task.cancel()
        await asyncio.gather(*callers, return_exceptions=True)


Collect: TypeAlias = Callable[[], Awaitable[metrics.Families]]
"""Function that collects the metrics of the daemon. The families are evaluated later, on another thread."""


def watch_port(
    address: Address, role: Role, unready: Unready, collect: Collect, tls: ssl.SSLContext | None = None
) -> HttpPort:
    async def show_metrics(question: Question) -> Answer:
        families = chain(await collect(), metrics.of_port(role, failed=port.failed))
        body, kind = await asyncio.to_thread(metrics.page, families, question.accept)
        return Answer(status=200, body=body, kind=kind)

    async def show_life(_: Question) -> Answer:
        return Answer.text(200, "it lives")

    async def show_readiness(_: Question) -> Answer:
        reasons = await unready()
        return Answer.text(503, *reasons) if reasons else Answer.text(200, "ready")

    port = HttpPort(address, {"/metrics": show_metrics, "/healthz": show_life, "/readyz": show_readiness}, tls)
    return port
