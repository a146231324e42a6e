"""A hash of consecutive records, so that replicas can be compared without sending what they hold.

It goes over the bytes of whole records, one behind the other. A record contains its own id and length, so the same hash
means the same records, however they were cut into pieces on the way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from waltzd.format.record import Run

HASH_BYTES = 16
TAIL_RECORDS = 16
"""So many of the last records tell whether two logs of format 0 end alike."""


@dataclass(frozen=True, kw_only=True)
class Digest:
    first_id: int
    last_id: int
    """Below the last id of the request where the digest was stopped."""
    hash: bytes
    bytes: int

    @property
    def records(self) -> int:
        return self.last_id - self.first_id + 1


class Hashing:
    """A digest in the making."""

    def __init__(self, first_id: int) -> None:
        self._first_id = self.next_id = first_id
        self._hash = blake2b(digest_size=HASH_BYTES)
        self.bytes = 0

    def add(self, run: Run) -> None:
        assert run.first_id == self.next_id, f"records from {run.first_id} on; {self.next_id} is next"
        self._hash.update(run.data)
        self.bytes += len(run.data)
        self.next_id = run.last_id + 1

    def digest(self) -> Digest:
        return Digest(first_id=self._first_id, last_id=self.next_id - 1, hash=self._hash.digest(), bytes=self.bytes)


def tail_hash(runs: Iterable[Run]) -> str:
    """Of consecutive records; empty where there are none."""
    hashing: Hashing | None = None
    for run in runs:
        hashing = hashing or Hashing(run.first_id)
        hashing.add(run)
    return "" if hashing is None else hashing.digest().hash.hex()
