"""How far a cluster is backed up, and how much would be lost with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from waltzctl.shell.moment import shown
from waltzctl.show.forms import Column, Columns, Listing, Page, grid, objects

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class BackedUpPartition:
    partition: int
    committed: int | None
    """As its owner says; None where none was asked or answers."""
    backed_up: int | None
    """The last id in the store, of a segment or of the tail."""
    transactions: int | None
    """Committed, and not in the store."""
    seconds: float | None
    """For how long something that is committed is not in the store, as its owner says; of a store alone: since then."""
    moment: int
    """All that was committed then is in the store: microseconds since 1970; 0: nobody says."""
    trouble: str


@dataclass(frozen=True, kw_only=True)
class SavedMetadata:
    """The documents of the cluster in the store."""

    number: int
    seconds: float | None
    """Since they were last seen there as they are, as the leader says."""
    moment: str
    """When they were read, as the newest ones in the store say."""
    trouble: str


PARTITIONS: Columns[BackedUpPartition] = (
    Column("partition", lambda one: one.partition, is_right=True, cell=str),
    Column("committed", lambda one: one.committed, is_right=True),
    Column("backed up", lambda one: one.backed_up, is_right=True, json="backed_up_to"),
    Column("lost now", lambda one: one.transactions, is_right=True, json="lost_transactions"),
    Column(
        "seconds", lambda one: None if one.seconds is None else round(one.seconds, 1), is_right=True, json="lost_seconds"
    ),
    Column("complete to", lambda one: shown(one.moment) if one.moment else None, json="complete_to"),
    Column("trouble", lambda one: one.trouble),
)


@dataclass(frozen=True, kw_only=True)
class Backups:
    place: str
    """The store that was asked; empty where owners were."""
    partitions: Sequence[BackedUpPartition]
    metadata: SavedMetadata | None

    def is_behind(self, seconds: float) -> bool:
        """Whether it does not go on, or owners say that it is so much behind."""
        is_late = not self.place and any((one.seconds or 0) > seconds for one in self.partitions)
        return is_late or any(one.trouble for one in self.partitions) or bool(self.metadata and self.metadata.trouble)

    def page(self) -> Page:
        saved = self.metadata

        def draw(out: Console) -> None:
            grid(out, PARTITIONS, self.partitions)
            if all(one.backed_up is None for one in self.partitions):
                out.print("Nothing is backed up: set `archive` in the configuration of the storages.", soft_wrap=True)
            out.print(f"Documents of the cluster: {self.documents()}", soft_wrap=True)

        told = {
            "store": self.place or None,
            "partitions": objects(PARTITIONS, self.partitions),
            "metadata": None if saved is None else {
                "number": saved.number, "seconds": saved.seconds, "moment": saved.moment or None, "trouble": saved.trouble,
            },
        }  # fmt: skip
        return Page(draw=draw, things=Listing(kind="partitions", columns=PARTITIONS, rows=self.partitions), told=told)

    def documents(self) -> str:
        """How those of the cluster are saved, in words."""
        saved = self.metadata
        if saved is None:
            return "none are saved" if self.place else "no leader says that they are saved"
        if saved.trouble:
            return saved.trouble
        if saved.moment:
            return f"number {saved.number}, as at {saved.moment}"
        if saved.seconds is None:
            return "not saved yet"
        return f"number {saved.number}, seen as they are {saved.seconds:.0f} seconds ago"
