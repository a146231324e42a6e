"""The service manager's end of the socket that daemons talk to: datagrams in the order in which they came."""

from __future__ import annotations

import socket
import time

PATIENCE_SECONDS = 60


class Ear:
    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def heard(self) -> list[str]:
        """Everything that has come, without waiting."""
        found: list[str] = []
        self._socket.settimeout(0)
        while True:
            try:
                found.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return found

    def until(self, *wanted: str) -> list[str]:
        """Everything up to a message that begins like one of these."""
        found: list[str] = []
        end = time.monotonic() + PATIENCE_SECONDS
        while not found or not found[-1].startswith(wanted):
            self._socket.settimeout(max(0.0, end - time.monotonic()))
            try:
                found.append(self._socket.recv(4096).decode())
            except (TimeoutError, BlockingIOError) as error:
                raise AssertionError(f"none of {wanted} came, but {found}") from error
        return found

    def close(self) -> None:
        self._socket.close()
