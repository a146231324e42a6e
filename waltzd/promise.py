"""The promise file of one replica: what it has bound itself to, durably, before it says so.

Two slots take turns, each in a page of its own. A change is a whole slot: written, flushed, and only then true. The file
remembers which file it is: in a directory that was copied or restored it finds itself to be another one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

from waltzd.control import write_new_file
from waltzd.disk import Disk, File, Inode, join
from waltzd.errors import ForeignCluster, HeaderDamaged, PartitionDamaged
from waltzd.layout import NEW_SUFFIX, NO_MARK, PROMISE_BYTES, PROMISE_NAME, ControlStruct, Promise, decode_promise_file


def floor_of(info: ControlStruct, promise: Promise) -> int:
    """The highest id that a replica is known to have had on its disk."""
    return max(info.local_low_mark, promise.committed, promise.durable)


class PromiseFile:
    def __init__(self, file: File, promise: Promise, inode: Inode) -> None:
        self._file = file
        self._inode = inode
        self.value = promise

    @staticmethod
    def create(
        disk: Disk,
        directory: str,
        *,
        key: UUID,
        partition: int,
        session: int,
        committed: int,
        durable: int = NO_MARK,
        newest: int = 0,
        segments: int = 0,
        is_clean: bool = False,
    ) -> None:
        """A new incarnation of the replica. The caller flushes the directory."""
        new = join(directory, PROMISE_NAME + NEW_SUFFIX)
        disk.create(new).close()
        inode = disk.inode(new)
        promise = Promise(
            key=key,
            partition=partition,
            incarnation=disk.fresh_id(),
            session=session,
            committed=committed,
            durable=durable,
            newest=newest,
            segments=segments,
            is_clean=is_clean,
            sequence=0,
            inode=inode.number,
            inode_generation=inode.generation,
        )
        write_new_file(disk, directory, PROMISE_NAME, promise.encode().ljust(PROMISE_BYTES, b"\0"))

    @staticmethod
    def open(disk: Disk, directory: str, *, key: UUID, partition: int) -> PromiseFile:
        path = join(directory, PROMISE_NAME)
        file = disk.open(path, write=True)
        promise = decode_promise_file(file.read(0, PROMISE_BYTES), path)
        if promise is None:
            raise PartitionDamaged(f"{path}: neither slot passes its checksum; partition {partition} is refused")
        if promise.key != key:
            raise ForeignCluster(f"{path} belongs to the cluster {promise.key}, not to {key}")
        if promise.partition != partition:
            raise HeaderDamaged(f"{path} belongs to partition {promise.partition}, not to {partition}")
        return PromiseFile(file, promise, disk.inode(path))

    @property
    def is_copy(self) -> bool:
        """These bytes were written to another file: somebody copied or restored the directory."""
        return not self._inode.is_same(Inode(self.value.inode, self.value.inode_generation))

    def promise(self, *, session: int, committed: int) -> None:
        self._change_both(session=session, committed=committed)

    def renew(self, incarnation: UUID) -> None:
        """Another replica from now on: what the old one acknowledged is not vouched for any more."""
        self._change_both(
            incarnation=incarnation, inode=self._inode.number, inode_generation=self._inode.generation, is_clean=False
        )

    def _change_both(self, **fields: Any) -> None:
        """In both slots: a slot that is damaged later must not bring a lower session or an old incarnation back."""
        self.change(**fields)
        self.change()

    def change(self, **fields: Any) -> None:
        new = replace(self.value, sequence=self.value.sequence + 1, **fields)
        self._file.write(new.slot_offset, new.encode())
        self._file.flush()
        self.value = new

    def close(self) -> None:
        self._file.close()
