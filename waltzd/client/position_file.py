"""File with the positions of a follower: for programs whose view is no database, but an index, a cache or a mailer.

The file is written as a whole beside the old one, flushed, and renamed: after a crash there is the old file or the new
one. It names its cluster and ends with a checksum, so a file of another cluster and a damaged file are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import closing
from uuid import UUID
from zlib import crc32

from waltzd.client.view import checked_position
from waltzd.disk.real import RealDisk
from waltzd.disk.seam import Disk, join, read_whole
from waltzd.errors import BadArgument, ForeignCluster, PositionsDamaged
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import FIRST

VERSION = 1
FILE_BYTES_MAX = 16 << 20
NEW_SUFFIX = ".new"


class PositionFile:
    """A file with the position of a follower in each partition, which survives crashes of program and machine.

    The program does its work first and saves the position then. So after a crash some transactions may come again, and
    none is left out: the work must be idempotent. One program writes a file.

    Example:
        ```python
        async with Client(servers) as client:
            file = PositionFile("index.position", client.cluster_key)
            async for transaction in client.feed(0, after=file.position(0)):
                await index.add(transaction.id, transaction.payload)
                file.save(0, transaction.position)
        ```
    """

    def __init__(self, path: str | os.PathLike[str], cluster: UUID) -> None:
        """Read the file. If it is missing there are no positions yet, and `save` creates it.

        Args:
            path: Path of the file. Its directory must exist.
            cluster: `client.cluster_key`.

        Raises:
            ForeignCluster: The positions in the file are those of another cluster.
            PositionsDamaged: The file is not what was written.
            WaltzError: The file cannot be read, or its directory is missing.
        """
        self._disk: Disk = RealDisk()
        self._open(os.path.abspath(path), cluster)

    def _open(self, path: str, cluster: UUID) -> None:
        self._path, self._cluster = path, cluster
        self._directory, _, self._name = path.rpartition("/")
        self._disk.names(self._directory)  # report a missing directory now, not at the first transaction
        self._positions = self._read() if self._disk.exists(path) else {}

    @classmethod
    def _on(cls, disk: Disk, path: str, cluster: UUID) -> PositionFile:
        """Return a position file on another disk, such as a simulated one."""
        file = cls.__new__(cls)
        file._disk = disk
        file._open(path, cluster)
        return file

    def position(self, partition: int) -> Position:
        """Return the position that was saved last for a partition; -1 if there is none."""
        return self._positions.get(partition, Position(EMPTY))

    @property
    def positions(self) -> Mapping[int, Position]:
        """All saved positions, by partition."""
        return dict(self._positions)

    def save(self, partition: int, position: int) -> None:
        """Save the position of a partition. When it returns, no crash takes the position back.

        It costs a flush of the disk: if many transactions come, save once for a batch (`Client.feed_batches`).

        Args:
            partition: Partition of the position.
            position: `transaction.position` of the last transaction that is done. A plain integer is a position of the
                first timeline of the log, so after a rescue or a restore it is refused above the fork.

        Raises:
            BadArgument: It is below the saved position. To start again, remove the file, or call `reset`.
            WaltzError: The file was not written; the old one is still there.
        """
        found = checked_position(position)
        if partition < 0 or found < self.position(partition):
            raise BadArgument(
                f"the position {found} of partition {partition} is below {self.position(partition)}, which {self._path} "
                "keeps",
                next_step="to begin again, end the program and remove the file, or call `reset`",
            )
        self._write({**self._positions, partition: found})

    def reset(self, partition: int, position: int) -> None:
        """Set a position back, after a rescue or a restore to the fork that `OtherTimeline` names. Undo the work above
        it first.

        Args:
            partition: Partition of the position.
            position: New position; the transactions after it are done again.

        Raises:
            BadArgument: `position` is no position.
            WaltzError: See `save`.
        """
        self._write({**self._positions, partition: checked_position(position)})

    def _write(self, positions: dict[int, Position]) -> None:
        with closing(self._disk.create(self._path + NEW_SUFFIX)) as file:
            file.write(0, _content(self._cluster, positions))
            file.flush()
        self._disk.rename(self._path + NEW_SUFFIX, join(self._directory, self._name))
        self._disk.flush_directory(self._directory)
        self._positions = positions

    def _read(self) -> dict[int, Position]:
        raw = read_whole(self._disk, self._path, FILE_BYTES_MAX)
        try:
            found = json.loads(raw)
            cluster = UUID(found["cluster"])
            positions = {int(partition): _position_of(kept) for partition, kept in found["positions"].items()}
            is_whole = raw == _content(cluster, positions)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, BadArgument):
            is_whole = False
        if not is_whole:
            raise PositionsDamaged(f"{self._path} is damaged: its checksum does not match its content", path=self._path)
        if cluster != self._cluster:
            raise ForeignCluster(
                f"{self._path} keeps positions in the cluster {cluster}, and the client is one of {self._cluster}",
                not_done="nothing was fed",
                next_step="give the client servers of that cluster, or this follower another file and an empty index",
            )
        return positions


def _position_of(kept: object) -> Position:
    """Return a position of the file. A number is a position of the first timeline; files have only numbers until an
    operator ends the log."""
    return Position.parse(kept) if isinstance(kept, str) else checked_position(kept)  # type: ignore[arg-type]


def _content(cluster: UUID, positions: Mapping[int, Position]) -> bytes:
    rows = {str(at): positions[at] for at in sorted(positions)}
    told = {at: int(one) if one.timeline == FIRST else one.text for at, one in rows.items()}
    body = json.dumps({"version": VERSION, "cluster": str(cluster), "positions": told})
    return f'{body[:-1]}, "crc": "{crc32(body.encode()):08x}"}}\n'.encode()
