"""`waltzctl storage`: commands for one running storage, and its replicas that are taken offline or cleared by hand.

A storage is given by its name in the cluster, or by the address of its admin port (`admin_listen` in its
configuration), which needs no cluster. The cluster key is read from the storage itself; with `--key` a storage of
another cluster is refused.

By name, changing replicas is like any change of a cluster: it is known what the partitions can lose, so there is a
plan, a confirmation and an entry in the history, and a dangerous change is refused. By address nothing is known of the
other replicas and nothing is recorded: that is for storages that belong to no cluster yet, or not any more.

Setting a forgotten replica aside is riskier than taking a replica offline. If no owner confirms that a majority holds
everything without it, for example because no server runs, it may be the replica that is needed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from uuid import UUID

from typer import Argument, Option

from waltzctl.placement.daemons import Daemons
from waltzctl.placement.mover import placement_state
from waltzctl.placement.replica_moves import PlacementState
from waltzctl.shell.change import Change, ChangeCommand, ConfirmOptions
from waltzctl.shell.cluster_target import (
    ClusterOptions,
    CommandTarget,
    StorageName,
    check_operator,
    first_contact,
    unknown,
    using,
)
from waltzctl.shell.interruption import interruptible
from waltzctl.shell.numbers import chosen, format_partitions, partitions_of
from waltzctl.shell.options import From, Key, Misused, Output
from waltzctl.shell.progress import Report
from waltzctl.shell.safety import Danger, Effect, Plan, danger, needed, without
from waltzctl.show import storage as shown_storage
from waltzctl.show.cluster import storages
from waltzctl.show.forms import AnyForm, put
from waltzctl.show.terminal import size
from waltzctl.snapshot.collector import snapshot_of
from waltzd.client import loop
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import Membership, PartitionMeta
from waltzd.errors import ForeignCluster, WaltzError
from waltzd.errors.exit_codes import EXIT_FINDINGS, EXIT_OK, EXIT_PARTIAL
from waltzd.format.finding import Finding
from waltzd.format.layout import aside_partition
from waltzd.protocol.channels import named_in
from waltzd.protocol.descriptions import SetAside, StorageDescription, VerifySummary
from waltzd.wire.storages import AdminClient
from waltzd.wire.tls import Tls

T = TypeVar("T")
NO_KEY = UUID(int=0)
KEPT_MS = 24 * 3600 * 1000
"""Milliseconds; files set aside more recently may belong to a mistake that was not noticed yet."""
LEFT = "Interrupted. The storage may still carry out the command: look with `waltzctl storage describe`."
Results = dict[int, WaltzError | None]
Act = Callable[[AdminClient], Awaitable[Results]]
Metas = Mapping[int, PartitionMeta | None]


@dataclass(frozen=True, kw_only=True)
class SelectedStorage:
    """Storage selected by its name or its address."""

    place: StorageName
    key: Key = None
    given: ClusterOptions

    @property
    def is_address(self) -> bool:
        return ":" in self.place

    def numbers(self, text: str) -> list[int]:
        if not self.is_address:
            return chosen(self.given.target(), text)
        if named_in(text):
            raise Misused("Channels are defined by the cluster: give the name of the storage, not its address.")
        return partitions_of(text)

    def ask(self, action: Callable[[AdminClient, StorageDescription], Awaitable[T]]) -> T:
        """Ask the storage for its identity, then run the action with its key."""
        name = None if self.is_address else self.place
        address, tls = (self.place, self.given.tls()) if name is None else self._found(name)

        async def run() -> T:
            async with (
                AdminClient(address, NO_KEY, seconds=10, tls=tls, name=name) as stranger,
                first_contact(address, tls),
            ):
                description = await stranger.describe()
            if self.key is not None and self.key != description.cluster_key:
                raise ForeignCluster(f"{address} belongs to the cluster {description.cluster_key}, not to {self.key}")
            async with AdminClient(address, description.cluster_key, tls=tls, name=name) as admin:
                return await action(admin, description)

        return loop.run(run())

    def _found(self, name: str) -> tuple[str, Tls | None]:
        target = self.given.target()
        there = using(target, Cluster.storages)
        if name not in there:
            raise unknown("storage", name, there)
        return there[name].admin_listen, target.tls


AnyStorage = Annotated[SelectedStorage, From(SelectedStorage)]


async def _itself(_client: AdminClient, description: StorageDescription) -> StorageDescription:
    return description


# -- looking -----------------------------------------------------------------------------------------------------------


def list_(*, target: CommandTarget, output: AnyForm = "table") -> int:
    """List the storages of a cluster: addresses, failure group, and state.

    \b
    Examples:
      waltzctl storage list
      waltzctl storage list -o name
    """
    put(storages(snapshot_of(target)), output)
    return EXIT_OK


def describe(*, place: AnyStorage, output: AnyForm = "table") -> int:
    """Show a running storage: its cluster, its partitions with their marks, and its counters since the start. STORAGE is
    its name, or its admin address.

    \b
    Examples:
      waltzctl storage describe storage-1
      waltzctl storage describe 127.0.0.1:55281 -o json
    """
    put(shown_storage.description(place.ask(_itself)), output)
    return EXIT_OK


def verify(
    *,
    place: AnyStorage,
    numbers: Annotated[str | None, Argument(metavar="[PARTITIONS]")] = None,
    output: AnyForm = "table",
) -> int:
    """Verify the files of a running storage: every record that is on its disk now. Appends continue. The owner of a
    partition repairs damage from the other replicas. Exit code 8 if damage was found.

    \b
    Examples:
      waltzctl storage verify storage-1
      waltzctl storage verify 127.0.0.1:55281 0-1 -o json
    """
    wanted = place.numbers(numbers) if numbers else []
    check_operator(place.given.tls(), "have files checked, which begins to heal what is damaged")

    async def ask(client: AdminClient, _: Any) -> tuple[list[Finding], list[VerifySummary]]:
        found = [one async for one in client.verify(wanted)]
        return (
            [one for one in found if isinstance(one, Finding)],
            [one for one in found if not isinstance(one, Finding)],
        )

    findings, summaries = place.ask(ask)
    put(shown_storage.verification(findings, summaries), output)
    return EXIT_FINDINGS if findings else EXIT_OK


# -- what nobody needs any more ----------------------------------------------------------------------------------------


def tidy(command: ChangeCommand, name: str) -> int:
    """`storage recover --clean`: set forgotten replicas aside, and delete what was set aside before."""

    async def prepare(cluster: Cluster) -> Change:
        now = await placement_state(cluster, Daemons(command.target.tls))
        forgotten = _forgotten(now, name)
        metas = {number: (await cluster.partition(number))[0] for number in forgotten}
        old = [one.name for one in answering(now, name).set_aside]

        async def do(_cluster: Cluster, _report: Report) -> Mapping[str, Any]:
            async with Daemons(command.target.tls).admin(now.found.meta.key, now.storage(name)) as admin:
                _check_all(await admin.remove_partitions(forgotten), "removed") if forgotten else None
                deleted = await admin.delete_aside(old) if old else []
            return {
                "set_aside": forgotten,
                "deleted": [{"name": one.name, "bytes": one.bytes} for one in deleted],
            }

        return Change(plan=tidying(now, name, metas), do=do, is_planned_again=True)

    return command.perform(prepare)


def tidying(now: PlacementState, name: str, metas: Metas) -> Plan:
    """Plan the removal of forgotten replicas. `metas`: documents of their partitions."""
    forgotten, cleaned = _forgotten(now, name), cleaning(now, name, answering(now, name).set_aside)
    margins = _left(now, name, forgotten, metas)
    steps = [f"set aside the files of {format_partitions(forgotten)} on {name}; not assigned to it"] if forgotten else []
    return Plan(
        verb="storage recover --clean",
        subject=name,
        steps=(*steps, *cleaned.steps),
        margins=tuple(margins),
        danger=max(danger(margins), cleaned.danger),
        unsafe=(*needed(margins, name), *cleaned.unsafe),
    )


def _forgotten(now: PlacementState, name: str) -> list[int]:
    """Return the partitions of which a storage holds a replica that no document assigns to it."""
    return sorted(one.partition for one in answering(now, name).assigned if name not in now.roles(one.partition))


def cleaning(now: PlacementState, name: str, found: Sequence[SetAside]) -> Plan:
    closed = {view.partition for view in now.found.partitions if not view.is_open}
    young = [one for one in found if one.kept_ms < KEPT_MS]
    return Plan(
        verb="storage recover --clean",
        subject=name,
        steps=tuple(
            f"delete {one.name}, {size(one.bytes)}{', which may be younger than a day' if one in young else ''}"
            for one in found
        ),
        danger=Danger.TYPED if young else Danger.ASK,
        unsafe=tuple(
            f"partition {aside_partition(one.name)} takes no transactions: {one.name} may be needed"
            for one in found
            if aside_partition(one.name) in closed
        ),
    )


# -- single replicas ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StorageChange(SelectedStorage):
    """Change of one storage by hand: by name with a plan and a confirmation, by address immediately."""

    confirmation: ConfirmOptions
    output: Output = "table"

    def change(self, numbers: list[int], done: str, plan: Callable[[PlacementState], Plan], act: Act) -> int:
        return self._at_once(done, act) if self.is_address else self._planned(numbers, done, plan, act)

    def _planned(self, numbers: list[int], done: str, plan: Callable[[PlacementState], Plan], act: Act) -> int:
        name, target = self.place, self.given.target()

        async def prepare(cluster: Cluster) -> Change:
            now = await placement_state(cluster, Daemons(target.tls))
            now.storage(name)
            now.check_partitions(numbers)
            meta = now.found.meta
            if self.key is not None and self.key != meta.key:
                raise ForeignCluster(f"{name} belongs to the cluster {meta.name}, {meta.key}, not to {self.key}")

            async def do(_cluster: Cluster, _report: Report) -> Mapping[str, Any]:
                async with Daemons(target.tls).admin(now.found.meta.key, now.storage(name)) as admin:
                    results = await act(admin)
                _check_all(results, done)
                return shown_storage.results(results, done).document

            return Change(plan=plan(now), do=do, is_planned_again=True)

        return ChangeCommand(confirmation=self.confirmation, target=target, output=self.output).perform(prepare)

    def _at_once(self, done: str, act: Act) -> int:
        """Return the exit code; partial success has a code of its own."""
        confirmation = self.confirmation
        check_operator(self.given.tls(), "change a storage")
        if confirmation.is_dry or confirmation.reason or confirmation.confirm or confirmation.override:
            raise Misused(
                "--dry-run, --reason, --confirm and --override need the name of a storage: by an address, the other "
                "storages are not known."
            )
        with interruptible(LEFT):
            results = self.ask(lambda admin, _: act(admin))
        put(shown_storage.results(results, done), self.output)
        if self.output == "table":
            shown_storage.print_refusals(results)
        errors = [error for error in results.values() if error is not None]
        if not errors:
            return EXIT_OK
        return errors[0].exit_code if len(errors) == len(results) else EXIT_PARTIAL


AnyChange = Annotated[StorageChange, From(StorageChange)]
Numbers = Annotated[str, Argument(metavar="PARTITIONS")]


def availability(
    *,
    on: AnyChange,
    numbers: Numbers,
    online: Annotated[bool | None, Option("--online/--offline", help="New state. Give one of the two.")] = None,
) -> int:
    """Take replicas of PARTITIONS on a storage offline, or online again. A replica that is offline refuses every
    session. If the storage is given by name, the command is refused if a partition would lose its majority; if it is
    given by address, the other replicas are not checked.

    \b
    Examples:
      waltzctl storage availability 127.0.0.1:55281 0-1 --offline
      waltzctl storage availability 127.0.0.1:55281 0-1 --online
    """
    wanted = on.numbers(numbers)
    if online is None:
        raise Misused("Give --online or --offline.")
    is_online, done = online, "online" if online else "offline"

    def plan(now: PlacementState) -> Plan:
        return switching(now, on.place, wanted, is_online=is_online)

    return on.change(wanted, done, plan, lambda admin: admin.set_available(wanted, is_online))


def _check_all(results: Results, done: str) -> None:
    refused = {number: error for number, error in results.items() if error is not None}
    if refused:
        number, error = next(iter(refused.items()))
        others = [other for other in results if other not in refused]
        also = f"; {format_partitions(others, 'is', 'are')}" if others else ""
        raise type(error)(
            f"partition {number}: {error.message}",
            not_done=f"{format_partitions(refused, 'is', 'are')} not {done}{also}",
            next_step=error.detail_next_step,
        )


# -- the plans ---------------------------------------------------------------------------------------------------------


def switching(now: PlacementState, name: str, chosen: Sequence[int], *, is_online: bool) -> Plan:
    steps = [
        without(number, roles, now.found.level(number), silent=[name])
        for number in chosen
        if name in (roles := now.roles(number)) and not is_online
    ]
    words = f"take {format_partitions(chosen)} {'online' if is_online else 'offline'} on {name}"
    return Plan(verb="storage availability", subject=name, steps=(words,), margins=tuple(steps), danger=danger(steps))


def _left(now: PlacementState, name: str, chosen: Sequence[int], metas: Metas) -> list[Effect]:
    """Describe what remains of partitions that may have data to lose."""
    margins = list[Effect]()
    for number in chosen:
        meta = metas[number]
        if meta is None or (meta.opened == 0 and meta.decision is None):
            continue  # it never had a session
        roles: Mapping[str, Membership] = now.roles(number)
        if name not in roles and name in meta.members:  # it still has a vote
            roles = dict.fromkeys(meta.members, Membership.MEMBER)
        margins.append(without(number, roles, now.found.level(number), silent=[name]))
    return margins


def answering(now: PlacementState, name: str) -> StorageDescription:
    """Return the description of the storage; raise if it does not answer."""
    now.storage(name)
    view = now.found.storage(name)
    if view.reported is None:
        assert view.error is not None
        raise type(view.error)(
            f"the storage {name} does not answer: {view.error.message}",
            not_done="nothing was changed",
            next_step=view.error.detail_next_step,
        )
    return view.reported
