"""JSON objects that carry a digest of themselves: what an archive and an export consist of. Pure.

Reading is strict three times over. The digest finds bit rot, `waltzd.protocol.document` finds a field that cannot be, and
the reader writes again what it has understood: only an object that is exactly what it would write is taken.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from waltzd.errors import UnknownVersion, WaltzError
from waltzd.protocol.document import parse


def sha256_of(data: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, kw_only=True)
class DigestFormat:
    """Format of JSON objects, each of which has a member with the SHA-256 of all others."""

    name: str
    version: int
    thing: str
    """One of the objects, with its article, for messages."""
    damage: type[WaltzError]
    """Error for an object that is not what was written."""

    def with_digest(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Return the object with its format, its version and its digest."""
        whole = {"format": self.name, "version": self.version, **value}
        return {**whole, "sha256": _digest(whole)}

    def parse(self, text: bytes, where: str) -> dict[str, Any]:
        """Return what was given to `with_digest`. Raise `UnknownVersion` if a newer Waltz wrote it, or
        `damage` if it is not what was written."""
        try:
            value = parse(text)
        except ValueError as error:
            raise self.damage(f"{where} cannot be understood: {error}") from error
        if not isinstance(value, dict) or value.get("format") != self.name:
            raise self.damage(f"{where} is not {self.thing}")
        version = value.get("version")
        if type(version) is int and version > self.version:
            raise UnknownVersion(f"{where} is {self.thing} of version {version}; this program knows {self.version}")
        if value.pop("sha256", None) != _digest(value) or version != self.version:
            raise self.damage(f"{where} does not have the checksum that it carries")
        del value["format"], value["version"]
        return value


def _digest(value: Mapping[str, Any]) -> str:
    return sha256_of(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())
