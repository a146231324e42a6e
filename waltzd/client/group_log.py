"""A client of the group log alone: how servers read and write where the groups stand.

Applications never see that log, so `Client` refuses its number. A server opens this client instead, which has no other
partition; everything else is as in `Client`: a view is fed from its position on, `submit` and `append` name `number`.
Before the cluster has a group log, the client waits for it as for a partition that nobody owns.
"""

from __future__ import annotations

from typing import TypeVar

from waltzd.client.client import Client
from waltzd.client.routes import Partitions
from waltzd.errors import BadArgument, Trimmed

E = TypeVar("E")


class GroupLogClient(Client[E]):
    @property
    def number(self) -> int:
        """Of the group log, once the client is open: the one behind those of the partitions."""
        return self.partition_count

    async def _set_partitions(self, partitions: Partitions, seconds: float) -> None:
        await super()._set_partitions((self.number,), seconds)

    async def first_id(self) -> int:
        """Where reading begins: all that is needed to know where the groups stand is said from there on."""
        try:
            await self.read_some(self.number, 0)
        except Trimmed as error:
            return error.number("floor") or 0
        return 0

    def _check_number(self, partition: int) -> None:
        if partition != self.number:
            raise BadArgument(f"this client is for the group log, {self.number}, and not for partition {partition!r}")
