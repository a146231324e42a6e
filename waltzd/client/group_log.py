"""Client of the group log alone: how servers read and write the state of consumer groups.

Applications never see the group log, so `Client` refuses its number. A server opens this client instead, which has no
other partition and is otherwise like `Client`: a view is fed from its position on, and `submit` and `append` name
`number`. Until the cluster has a group log, the client waits for it as for a partition without an owner."""

from __future__ import annotations

from waltzd.client.client import Client
from waltzd.client.routes import Partitions
from waltzd.client.view import E
from waltzd.errors import BadArgument, Trimmed


class GroupLogClient(Client[E]):
    @property
    def number(self) -> int:
        """Number of the group log, once the client is open: the number after the last partition."""
        return self.partition_count

    async def _set_partitions(self, partitions: Partitions, seconds: float) -> None:
        await super()._set_partitions((self.number,), seconds)

    async def first_id(self) -> int:
        """Return the first id that the group log still has. Everything that is needed to know the state of the groups
        follows it."""
        try:
            await self.read_some(self.number)
        except Trimmed as error:
            return error.number("floor") or 0
        return 0

    def _check_number(self, partition: int) -> None:
        if partition != self.number:
            raise BadArgument(f"this client is for the group log, {self.number}, and not for partition {partition!r}")
