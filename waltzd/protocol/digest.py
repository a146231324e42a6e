"""JSON objects that contain a digest of themselves, as the manifests of archives and exports. Pure.

Reading makes three checks. The digest detects bit rot. `waltzd.protocol.document` detects invalid fields. The reader then
encodes the decoded value again, and accepts the object only if the result is identical.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from waltzd.errors import WaltzError
from waltzd.errors.operations import UnknownVersion
from waltzd.protocol.document import parse


def sha256_of(data: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, kw_only=True)
class DigestFormat:
    """A format of JSON objects that have a member with the SHA-256 of all other members."""

    name: str
    version: int
    """Newest version; each version from 1 on can be read."""
    thing: str
    """Noun for one of the objects, with its article, for error messages."""
    damage: type[WaltzError]
    """Class of the error for a damaged object."""

    def with_digest(self, value: Mapping[str, Any], *, version: int | None = None) -> dict[str, Any]:
        """Return the object with its format, its version (the newest by default) and its digest."""
        whole = {"format": self.name, "version": self.version if version is None else version, **value}
        return {**whole, "sha256": _digest(whole)}

    def parse(self, text: bytes, where: str) -> dict[str, Any]:
        """Return the object that was passed to `with_digest`.

        Raises:
            UnknownVersion: A newer Waltz wrote the object.
            WaltzError: The object is damaged; the class is `damage`.
        """
        try:
            value = parse(text)
        except ValueError as error:
            raise self.damage(f"{where} cannot be understood: {error}") from error
        if not isinstance(value, dict) or value.get("format") != self.name:
            raise self.damage(f"{where} is not {self.thing}")
        version = value.get("version")
        if type(version) is int and version > self.version:
            raise UnknownVersion(f"{where} is {self.thing} of version {version}; this program knows {self.version}")
        if value.pop("sha256", None) != _digest(value) or type(version) is not int or version < 1:
            raise self.damage(f"{where} does not have the checksum that it carries")
        del value["format"], value["version"]
        return value


def _digest(value: Mapping[str, Any]) -> str:
    return sha256_of(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())
