"""Signatures of archive objects, so that write access to the store is not enough to forge a log.

Manifests, the label, `tail.json` and the saved metadata name everything else by its SHA-256. Each of these objects ends
with a signature line: an HMAC-SHA256 over its name and its content with a key of the cluster. The key is in a file of
storages, servers and operators, and never in the store.

`SignedStore` wraps a store: it signs objects that are written, checks objects that are read, and strips the signature line.
Nothing else in this package handles signatures. Without a key nothing is checked or signed. With `accepts_unsigned`,
objects from before the key existed are readable; `waltzctl archive sign` signs them.

A signature proves that an object was written by the cluster, not that it is the newest: with write access, an attacker can
delete objects, or replace an object by an older version of it.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from waltzd.archive.store import Listed, Store
from waltzd.disk.seam import Buffer
from waltzd.errors.operations import BadConfig, ObjectExists, UnsignedArchive

VARIABLE = "WALTZ_ARCHIVE_KEY"
"""Environment variable of commands with the path of the key file."""
KEY_BYTES = 32
_KEY = re.compile(rb"waltz-archive-key:([0-9a-f]{64})\n?")
_LINE = re.compile(rb'\{"signature":"([0-9a-f]{64})"\}\n\Z')
LINE_BYTES = len(b'{"signature":""}\n') + 64


def is_signed(name: str) -> bool:
    """Return whether objects of this name carry a signature. Chunks, segments and slots have none, because a signed object
    states their hash."""
    return name.endswith(".json") and "/chunk/" not in name


def new_key() -> bytes:
    """Return the content of a key file with a new key."""
    return b"waltz-archive-key:" + secrets.token_bytes(KEY_BYTES).hex().encode() + b"\n"


def read_key(path: str | Path) -> bytes:
    """Read the key in a file; raise `BadConfig` if it holds no key, or if other users can read it."""
    try:
        with open(path, "rb") as file:
            mode, found = os.fstat(file.fileno()).st_mode, _KEY.fullmatch(file.read(200))
    except OSError as error:
        raise BadConfig(f"{path}: the key of the archive cannot be read: {error.strerror}") from error
    if stat.S_IMODE(mode) & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadConfig(f"{path} holds a key and is readable by other users of this machine: chmod 600 {path}")
    if found is None:
        raise BadConfig(f"{path} holds no key of an archive; `waltzctl archive sign --new-key FILE` makes one")
    return bytes.fromhex(found[1].decode())


def key_of_environment() -> bytes | None:
    path = os.environ.get(VARIABLE)
    return read_key(path) if path else None


class SignedStore:
    def __init__(self, store: Store, key: bytes | None, *, accepts_unsigned: bool = False) -> None:
        """`accepts_unsigned`: read objects without a signature. A wrong signature is always an error."""
        self._store = store
        self._key = key
        self._accepts_unsigned = accepts_unsigned or key is None
        self.seen: Counter[str] = Counter()
        """Numbers of objects that were read: `verified`, `unsigned`, or `unchecked` (signed, but no key was given)."""

    @property
    def place(self) -> str:
        return self._store.place

    @property
    def inner(self) -> Store:
        """The wrapped store."""
        return self._store

    def put_new(self, name: str, data: Buffer) -> str:
        return self._store.put_new(name, self._signed(name, data))

    def put_if(self, name: str, data: Buffer, tag: str) -> str:
        return self._store.put_if(name, self._signed(name, data), tag)

    def get_range(self, name: str, offset: int, size: int) -> bytes:
        """Read a range of an object. A signed object is read from its start to the end of the range, and one signature line
        more, to check it. If it is longer than that, it exceeds the limit of its kind: the bytes are returned unchecked,
        and the caller rejects them by their length."""
        if not is_signed(name):
            return self._store.get_range(name, offset, size)
        wanted = offset + size + LINE_BYTES
        found = self._store.get_range(name, 0, wanted)
        return (found if len(found) == wanted else self._checked(name, found))[offset : offset + size]

    def list(self, folder: str) -> list[Listed]:
        return self._store.list(folder)

    def head(self, name: str) -> Listed:
        return self._store.head(name)

    def remove(self, name: str) -> None:
        self._store.remove(name)

    # -- signatures

    def _signed(self, name: str, data: Buffer) -> Buffer:
        if not is_signed(name):
            return data
        if self._key is None:
            if self.seen["unchecked"]:
                raise UnsignedArchive(
                    f"{name} in {self.place}: this archive is signed, and there is no key to sign with",
                    not_done="nothing was written",
                    next_step=f"give the key: `archive_key` of a daemon, {VARIABLE} of a person",
                )
            return data
        text = bytes(data)
        return text + b'{"signature":"' + _signature(self._key, name, text).encode() + b'"}\n'

    def _checked(self, name: str, found: bytes) -> bytes:
        line = _LINE.search(found)
        if line is None:
            if not self._accepts_unsigned:
                raise UnsignedArchive(f"{name} in {self.place} carries no signature, and this archive has a key")
            self.seen["unsigned"] += 1
            return found
        text = found[: line.start()]
        if self._key is None:
            self.seen["unchecked"] += 1
        elif not hmac.compare_digest(_signature(self._key, name, text), line[1].decode()):
            raise UnsignedArchive(f"{name} in {self.place} was not signed with the key of this archive")
        else:
            self.seen["verified"] += 1
        return text


def _signature(key: bytes, name: str, text: bytes) -> str:
    return hmac.new(key, b"waltz-archive\0" + name.encode() + b"\0" + text, "sha256").hexdigest()


def unsigned_among(store: Store, key: bytes, names: Iterable[str]) -> list[str]:
    """Return the names of the objects without a signature; raise `UnsignedArchive` if another key signed one."""
    signing, found = SignedStore(store, key, accepts_unsigned=True), []
    for name in names:
        before = signing.seen["unsigned"]
        signing.get_range(name, 0, store.head(name).size)
        found += [name] if signing.seen["unsigned"] > before else []
    return found


def sign_all(store: Store, key: bytes, names: Iterable[str]) -> list[str]:
    """Sign those of the objects that have no signature, and return their names. Their content is not checked: the caller
    has to trust the store. An object that a daemon replaces meanwhile is skipped, because the daemon signs it."""
    signing, made = SignedStore(store, key), []
    for name in names:
        listed = store.head(name)
        if unsigned_among(store, key, [name]):
            with suppress(ObjectExists):
                signing.put_if(name, store.get_range(name, 0, listed.size), listed.tag)
                made.append(name)
    return made
