"""Findings: everything that can be wrong with the files of a storage.

A function that reads a file returns its value and its findings. A daemon raises the first finding (`Finding.error`); the
tools for stopped storages list all of them.
"""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field

from waltzd.errors import ForeignCluster, WaltzError
from waltzd.errors.operations import (
    ControlDamaged,
    HeaderDamaged,
    NotRegularFile,
    PartitionDamaged,
    ReadFailed,
    UnknownVersion,
)


class Code(enum.StrEnum):
    """The kinds of findings. The values are part of the JSON output."""

    TORN_TAIL = "torn-tail"
    DAMAGED_RECORD = "damaged-record"
    DAMAGED_PAYLOAD = "damaged-payload"
    DAMAGED_HEADER = "damaged-header"
    UNKNOWN_VERSION = "unknown-version"
    FOREIGN_KEY = "foreign-cluster-key"
    FOOTER_MISSING = "footer-missing"
    DAMAGED_FOOTER = "damaged-footer"
    WRONG_FOOTER = "wrong-footer"
    BROKEN_CHAIN = "broken-chain"
    SEGMENT_GAP = "segment-gap"
    SHORT_LOG = "short-log"
    MISSING_INDEX = "missing-index"
    DAMAGED_INDEX = "damaged-index"
    MISSING_INDEX_ENTRY = "missing-index-entry"
    WRONG_INDEX_ENTRY = "wrong-index-entry"
    EXTRA_INDEX_ENTRY = "extra-index-entry"
    LONE_INDEX = "lone-index"
    CONTROL_STRUCT = "damaged-control-struct"
    CONTROL_FILE = "damaged-control-file"
    HARD_STATE_SLOT = "damaged-promise-slot"
    HARD_STATE_FILE = "damaged-promise-file"
    MISSING_PARTITION = "missing-partition"
    NOT_A_FILE = "not-a-file"
    UNREADABLE = "unreadable"


_FROM_REPLICAS = "rebuild this replica from the others"
_REBUILD_INDEX = "waltzctl rebuild-index"
_MADE_AGAIN = "nothing to do: the storage makes it again from the records"
_SECOND_COPY = "nothing to do: the other copy is used and the next change repairs it"

REMEDY = {
    Code.TORN_TAIL: "nothing to do: the storage cuts it at its next start",
    Code.DAMAGED_RECORD: _FROM_REPLICAS,
    Code.DAMAGED_PAYLOAD: "the payload was wrong when it reached the storage; compare with the other replicas",
    Code.DAMAGED_HEADER: _FROM_REPLICAS,
    Code.UNKNOWN_VERSION: "use the Waltz version that wrote the file",
    Code.FOREIGN_KEY: "move the file to the cluster that it belongs to",
    Code.FOOTER_MISSING: _MADE_AGAIN,
    Code.DAMAGED_FOOTER: _MADE_AGAIN,
    Code.WRONG_FOOTER: _FROM_REPLICAS,
    Code.BROKEN_CHAIN: "compare with the other replicas, and " + _FROM_REPLICAS,
    Code.SEGMENT_GAP: "put the missing segment back, or " + _FROM_REPLICAS,
    Code.SHORT_LOG: _FROM_REPLICAS,
    Code.MISSING_INDEX: _REBUILD_INDEX,
    Code.DAMAGED_INDEX: _REBUILD_INDEX,
    Code.MISSING_INDEX_ENTRY: _REBUILD_INDEX,
    Code.WRONG_INDEX_ENTRY: _REBUILD_INDEX,
    Code.EXTRA_INDEX_ENTRY: _REBUILD_INDEX,
    Code.LONE_INDEX: "put the missing segment back; if there never was one, nothing to do",
    Code.CONTROL_STRUCT: _SECOND_COPY,
    Code.CONTROL_FILE: _FROM_REPLICAS,
    Code.HARD_STATE_SLOT: _SECOND_COPY,
    Code.HARD_STATE_FILE: _FROM_REPLICAS,
    Code.MISSING_PARTITION: _FROM_REPLICAS,
    Code.NOT_A_FILE: "put the plain file in its place",
    Code.UNREADABLE: "look at the kernel log for this device; " + _FROM_REPLICAS,
}

INDEX_CODES = frozenset(code for code in Code if code.endswith(("-index", "-index-entry")))
"""Codes of a wrong index. The data is sound, and the index can be rebuilt from it."""

FOOTER_CODES = frozenset((Code.FOOTER_MISSING, Code.DAMAGED_FOOTER))
"""Codes of a missing or damaged footer. The batches are sound, and the footer can be rebuilt from them."""

HARMLESS_CODES = (
    INDEX_CODES | FOOTER_CODES | {Code.TORN_TAIL, Code.CONTROL_STRUCT, Code.HARD_STATE_SLOT, Code.DAMAGED_PAYLOAD}
)
"""Codes that are no damage: a replica with these alone holds everything that it acknowledged, as it was sent."""

_ERRORS: dict[Code, type[WaltzError]] = {
    Code.DAMAGED_HEADER: HeaderDamaged,
    Code.UNKNOWN_VERSION: UnknownVersion,
    Code.FOREIGN_KEY: ForeignCluster,
    Code.CONTROL_FILE: ControlDamaged,
    Code.NOT_A_FILE: NotRegularFile,
    Code.UNREADABLE: ReadFailed,
}
"""Class of the error that a daemon raises, by code; `PartitionDamaged` for all other codes."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a file. Ranges of bytes and of ids include both ends; None if there is no range."""

    code: Code
    path: str
    detail: str
    partition: int | None = field(default=None, kw_only=True)
    first_byte: int | None = field(default=None, kw_only=True)
    last_byte: int | None = field(default=None, kw_only=True)
    first_id: int | None = field(default=None, kw_only=True)
    last_id: int | None = field(default=None, kw_only=True)

    @property
    def remedy(self) -> str:
        return REMEDY[self.code]

    @property
    def is_damage(self) -> bool:
        """True if the replica may lack something that it acknowledged."""
        return self.code not in HARMLESS_CODES

    def sentence(self) -> str:
        where = self.path
        if self.first_byte is not None:
            where += f", bytes {self.first_byte} to {self.last_byte}"
        if self.first_id is not None:
            ids = f"id {self.first_id}" if self.first_id == self.last_id else f"ids {self.first_id} to {self.last_id}"
            where += f", {ids}"
        return f"{self.code}: {where}: {self.detail}"

    def error(self) -> WaltzError:
        error = _ERRORS.get(self.code, PartitionDamaged)(f"{self.path}: {self.detail}")
        if self.partition is not None:
            error.facts["partition"] = str(self.partition)
        return error

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "code": str(self.code), "remedy": self.remedy}


class Findings(list[Finding]):
    """The findings of one file."""

    def __init__(self, path: str, partition: int | None = None) -> None:
        super().__init__()
        self._path = path
        self._partition = partition

    def find(self, code: Code, detail: str, first_byte: int | None = None, size: int = 1) -> None:
        place = {} if first_byte is None else {"first_byte": first_byte, "last_byte": first_byte + size - 1}
        self.append(Finding(code, self._path, detail, partition=self._partition, **place))


def unreadable(path: str, error: NotRegularFile | ReadFailed) -> Finding:
    return Finding(Code.NOT_A_FILE if isinstance(error, NotRegularFile) else Code.UNREADABLE, path, error.message)


assert set(REMEDY) == set(Code)
