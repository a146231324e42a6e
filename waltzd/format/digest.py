"""A hash of consecutive records, so that replicas can be compared without sending what they hold.

The hash covers the bytes of whole records back to back. A record contains its own id and length, so equal hashes mean equal
records, whatever the sizes of the pieces in which they were hashed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from waltzd.format.record import Run

HASH_BYTES = 16
TAIL_RECORDS = 16
"""Number of records at the end of a log of format 0 that are compared to find out whether two logs end alike."""


@dataclass(frozen=True, kw_only=True)
class Digest:
    first_id: int
    last_id: int
    """Last id that was hashed: lower than the requested one if the digest was stopped."""
    hash: bytes
    bytes: int

    @property
    def records(self) -> int:
        return self.last_id - self.first_id + 1


class Hashing:
    """Builder of a `Digest`, which takes consecutive runs."""

    def __init__(self, first_id: int) -> None:
        self._first_id = self.next_id = first_id
        self._hash = blake2b(digest_size=HASH_BYTES)
        self.bytes = 0

    def add(self, run: Run) -> None:
        assert run.first_id == self.next_id, f"records start at id {run.first_id}; {self.next_id} is next"
        self._hash.update(run.data)
        self.bytes += len(run.data)
        self.next_id = run.last_id + 1

    def digest(self) -> Digest:
        return Digest(first_id=self._first_id, last_id=self.next_id - 1, hash=self._hash.digest(), bytes=self.bytes)


def tail_hash(runs: Iterable[Run]) -> str:
    """Return the hash of consecutive runs in hexadecimal; "" without records."""
    hashing: Hashing | None = None
    for run in runs:
        hashing = hashing or Hashing(run.first_id)
        hashing.add(run)
    return "" if hashing is None else hashing.digest().hash.hex()
