"""`waltzctl partition compare`: compare the replicas of a partition byte for byte.

The storages hash their records; this module compares the hashes (`divergence`). A storage hashes only records that it knows
to be committed, so a replica that lags is compared up to its own mark. Only the first differing record of each replica is
fetched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

from typer import Argument, Option

from waltzctl.records.divergence import Answers, Compared, Comparison, Question, Standing, comparison
from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget, check_operator, unknown, using
from waltzctl.shell.numbers import check_partitions
from waltzctl.shell.progress import Shown, ShownProgress, Waiting
from waltzctl.show.forms import AnyForm
from waltzd.cluster.documents import StorageMeta
from waltzd.errors import BadArgument, CannotConnect, NoSuchPartition, WaltzError

if TYPE_CHECKING:
    from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, StorageView
    from waltzd.cluster.cluster import Cluster
    from waltzd.format.digest import Digest
    from waltzd.format.record import Record
    from waltzd.protocol.descriptions import ReplicaStatus
    from waltzd.wire.storages import AdminClient

READ_SECONDS = 10.0


def compare(
    *,
    partition: Annotated[int, Argument(min=0, metavar="PARTITION")],
    names: Annotated[
        tuple[str, ...],
        Option("--storage", metavar="NAME", help="Compare only the replicas on these storages; all by default."),
    ] = (),
    seconds: Annotated[
        float, Option("--timeout", min=0.1, metavar="SECONDS", help="Timeout of each answer of a storage.")
    ] = 30.0,
    target: CommandTarget,
    output: AnyForm = "table",
    progress: ShownProgress = Shown.AUTO,
) -> int:
    """Compare the committed records of the replicas of PARTITION while the cluster runs. Each storage hashes its replica;
    records are sent only if replicas differ.

    The exit code is 8 if replicas differ, and 7 if one could not be compared.

    \b
    Examples:
      waltzctl partition compare 0
      waltzctl partition compare 1 -o json
    """
    from waltzctl.show import records
    from waltzctl.show.forms import put

    check_operator(target.tls, "compare what replicas hold")
    with Waiting(progress) as waiting:
        found = using(target, lambda cluster: _compare(cluster, target, partition, names, seconds, waiting))
    put(records.comparison(found), output)
    return found.exit_code


async def _compare(
    cluster: Cluster, target: ClusterTarget, partition: int, names: tuple[str, ...], seconds: float, waiting: Waiting
) -> Comparison:
    from waltzctl.snapshot.collector import take_snapshot

    snapshot = await take_snapshot(cluster.coordinator, tls=target.tls)
    views = _chosen(snapshot, partition, names)
    roles = snapshot.partitions[partition].replicas
    marks: dict[str, int] = {}
    troubles: dict[str, WaltzError] = {}
    last_ids: dict[str, int] = {}
    for name, view in views.items():
        found = _status(view, partition)
        if isinstance(found, WaltzError):
            troubles[name] = found
        else:
            marks[name], last_ids[name] = visible_mark(found), found.last_id
    owned = snapshot.partitions[partition].reported
    committed = max([-1 if owned is None else owned.committed, *marks.values()])
    metas = {name: view.meta for name, view in views.items()}
    async with _Asking(partition, snapshot.meta.key, metas, target, seconds, waiting) as asking:
        standings = await asking.run(marks)
        ids = {standing.difference[0] for standing in standings.values() if standing.difference is not None}
        differing = {id_: await asking.records([name for name in marks if marks[name] >= id_], id_) for id_ in sorted(ids)}
    standings |= {name: Standing(mark=-1, error=trouble) for name, trouble in troubles.items()}
    return Comparison(
        partition=partition,
        committed=committed,
        replicas=tuple(
            Compared(
                storage=name,
                role=roles.get(name),
                standing=standings[name],
                last_id=last_ids.get(name),
                behind=max(0, committed - last_ids[name]) if name in last_ids else None,
            )
            for name in sorted(views)
        ),
        differing=differing,
        exchanges=asking.exchanges,
        hashed_bytes=asking.hashed_bytes,
    )


def visible_mark(status: ReplicaStatus) -> int:
    """Return the last id that the storage knows to be committed."""
    return max(status.committed, min(status.low_mark, status.last_id))


def _chosen(snapshot: ClusterSnapshot, partition: int, names: tuple[str, ...]) -> dict[str, StorageView]:
    check_partitions(
        [partition],
        snapshot.meta.partitions,
        has_group_log=snapshot.group_log is not None,
        not_done="nothing was compared",
    )
    there = {view.meta.name: view for view in snapshot.storages}
    replicas = snapshot.partitions[partition].replicas
    for name in names:
        if name not in there:
            raise unknown("storage", name, there, not_done="nothing was compared")
        if name not in replicas:
            raise NoSuchPartition(
                f"storage {name} has no replica of partition {partition}",
                not_done="nothing was compared",
                next_step=f"there are replicas on {', '.join(sorted(replicas))}",
            )
    chosen = list(dict.fromkeys(names)) or sorted(replicas)
    if len(names) and len(chosen) < 2:
        raise BadArgument(
            f"--storage {chosen[0]}: a comparison needs two replicas",
            not_done="nothing was compared",
            next_step="name two storages",
        )
    return {name: there[name] for name in chosen if name in there}


def _status(view: StorageView, partition: int) -> ReplicaStatus | WaltzError:
    name = view.meta.name
    if view.reported is None:
        assert view.error is not None
        return view.error
    found = next((held for held in view.reported.assigned if held.partition == partition), None)
    if found is None:
        return NoSuchPartition(f"storage {name} holds nothing of partition {partition}")
    if found.status is None:
        return found.refused or NoSuchPartition(f"storage {name} is changing partition {partition}")
    return found.status


@dataclass
class _Asking:
    """Connections to the storages, with counters of the work."""

    partition: int
    key: UUID
    metas: Mapping[str, StorageMeta]
    target: ClusterTarget
    seconds: float
    waiting: Waiting
    exchanges: int = 0
    hashed_bytes: int = 0
    _ends: AsyncExitStack = field(default_factory=AsyncExitStack)
    _admins: dict[str, AdminClient] = field(default_factory=dict)

    async def __aenter__(self) -> _Asking:
        from waltzd.wire.storages import AdminClient

        for name, meta in self.metas.items():
            admin = AdminClient(meta.admin_listen, self.key, seconds=self.seconds, tls=self.target.tls, name=name)
            self._admins[name] = await self._ends.enter_async_context(admin)
        return self

    async def __aexit__(self, *about: object) -> None:
        await self._ends.aclose()

    async def run(self, marks: Mapping[str, int]) -> dict[str, Standing]:
        conversation = comparison(marks)
        try:
            question = next(conversation)
            while True:
                question = conversation.send(await self._answers(question))
        except StopIteration as end:
            standings: dict[str, Standing] = end.value
            return standings

    async def _answers(self, question: Question) -> Answers:
        self.exchanges += 1
        self.waiting.report(
            f"comparing ids {question.first_id:,} to {question.last_id:,} on {', '.join(question.replicas)}"
        )
        asked = [self._digest(name, question) for name in question.replicas]
        answers = dict(zip(question.replicas, await asyncio.gather(*asked), strict=True))
        self.hashed_bytes += sum(found.bytes for found in answers.values() if not isinstance(found, WaltzError))
        return answers

    async def _digest(self, name: str, question: Question) -> Digest | WaltzError:
        try:
            return await self._admins[name].digest(self.partition, question.first_id, question.last_id)
        except WaltzError as error:
            return error

    async def records(self, names: list[str], id_: int) -> dict[str, Record | WaltzError]:
        found = await asyncio.gather(*(self._record(name, id_) for name in names))
        return dict(zip(names, found, strict=True))

    async def _record(self, name: str, id_: int) -> Record | WaltzError:
        from waltzd.wire.storages import ReplicaClient

        meta = self.metas[name]
        async with ReplicaClient(meta.listen, self.key, seconds=READ_SECONDS, tls=self.target.tls, name=name) as replica:
            try:
                async with asyncio.timeout(READ_SECONDS):
                    async for run in replica.read(self.partition, id_, id_):
                        return run.record(0)
                return CannotConnect(f"{name} answered without a record")
            except TimeoutError:
                return CannotConnect(f"{name} did not give record {id_} in {READ_SECONDS:g} seconds")
            except WaltzError as error:
                return error
