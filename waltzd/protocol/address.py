"""Network addresses, and the syntax of names of storages and servers."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from waltzd.errors import CannotConnect


@dataclass(frozen=True)
class Address:
    """A host and a port. Port 0 lets the system choose one."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the address. Names other than localhost are not resolved."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_ADDRESS = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:/\[\]]+)):([0-9]{1,5})")


def parse_address(text: str) -> Address:
    """Parse `host:port`; raise ValueError with a sentence for the user."""
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found[3]) > 65535 or not text.isprintable():
        raise ValueError(f"{text!r} is not an address; write host:port, as in 127.0.0.1:55280 or [::1]:55280")
    host = found[1] or found[2]
    try:
        host.encode("idna")  # as everything does that looks a name up
    except UnicodeError:
        what = "is not a host: between two dots of its name are 1 to 63 characters"
        raise ValueError(f"{text!r} is not an address: {host} {what}") from None
    return Address(host, int(found[3]))


def address_of_peer(text: str) -> Address:
    """Parse the address of another process, as a document or an answer gives it; raise `CannotConnect` if it is none."""
    try:
        return parse_address(text)
    except ValueError as error:
        raise CannotConnect(str(error)) from None


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def is_name(text: str) -> bool:
    """Return whether the text is a valid name of a server or storage. Names become parts of paths."""
    return _NAME.fullmatch(text) is not None
