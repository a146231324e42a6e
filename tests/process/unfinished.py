"""A caller of HTTP/2 that finishes nothing, and sends all that flow control allows."""

from __future__ import annotations

import contextlib
import socket
import struct

from tests.fuzz.hostile import (
    DATA,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SECONDS,
    SETTINGS,
    SETTINGS_KIND,
    WINDOW_UPDATE,
    frame,
    opening,
)  # fmt: skip


class Unfinished:
    """Calls on one connection that send all of their message but its end, as far as the other side lets them."""

    def __init__(self, connection: socket.socket, path: str, *, calls: int, size: int) -> None:
        self._connection = connection
        self._size = size
        self._buffer = bytearray()
        self._window, self._first_window = 65535, 65535
        self.refused: set[int] = set()
        self._windows = {1 + 2 * number: self._first_window for number in range(calls)}
        self.sent = dict.fromkeys(self._windows, 0)
        connection.sendall(PREFACE + SETTINGS + b"".join(opening(stream, path) for stream in self._windows))
        connection.settimeout(0.02)

    @property
    def is_over(self) -> bool:
        return all(stream in self.refused or sent == self._size - 1 for stream, sent in self.sent.items())

    def turn(self) -> None:
        """A frame of each call that may send one, and all answers that have come."""
        for stream in self._windows.keys() - self.refused:
            room = min(self._window, self._windows[stream], 16384, self._size - 1 - self.sent[stream])
            if room > 5:
                start = b"\0" + (self._size - 5).to_bytes(4, "big") if self.sent[stream] == 0 else b""
                self._connection.settimeout(SECONDS)
                self._connection.sendall(frame(DATA, 0, stream, start + bytes(room - len(start))))
                self._connection.settimeout(0.02)
                self._window -= room
                self._windows[stream] -= room
                self.sent[stream] += room
        with contextlib.suppress(TimeoutError):
            while more := self._connection.recv(1 << 16):
                self._buffer += more
        while len(self._buffer) >= 9 and len(self._buffer) >= 9 + (size := int.from_bytes(self._buffer[:3], "big")):
            self._take(
                self._buffer[3], self._buffer[4], int.from_bytes(self._buffer[5:9], "big"), self._buffer[9 : 9 + size]
            )
            del self._buffer[: 9 + size]

    def _take(self, kind: int, flags: int, stream: int, payload: bytearray) -> None:
        if kind == SETTINGS_KIND and not flags & 1:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == 4:
                    self._windows = {one: left + value - self._first_window for one, left in self._windows.items()}
                    self._first_window = value
            self._connection.sendall(frame(SETTINGS_KIND, 1, 0))
        elif kind == PING and not flags & 1:
            self._connection.sendall(frame(PING, 1, 0, bytes(payload)))
        elif kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind == WINDOW_UPDATE:
            self._windows[stream] += int.from_bytes(payload, "big")
        elif kind == RST_STREAM or (kind == HEADERS and flags & 1):
            self.refused.add(stream)
