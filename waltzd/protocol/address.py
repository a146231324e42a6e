"""Where to listen or to connect, and which names storages and servers may have."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Address:
    """Where to listen or to connect. Port 0 lets the system choose."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Only this machine reaches it. A name other than localhost could be anything."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_ADDRESS = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:/\[\]]+)):([0-9]{1,5})")


def parse_address(text: str) -> Address:
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found[3]) > 65535 or not text.isprintable():
        raise ValueError(f"{text!r} is not an address; write host:port, as in 127.0.0.1:55280 or [::1]:55280")
    return Address(found[1] or found[2], int(found[3]))


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def is_name(text: str) -> bool:
    """Whether a server or storage may be called so: it becomes a part of a path."""
    return _NAME.fullmatch(text) is not None
