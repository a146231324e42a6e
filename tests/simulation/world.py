"""One whole run: a cluster on a virtual clock, clients that race, what the plan lets go wrong, and a verdict.

The code is that of the daemons and of the client; around it everything is simulated. At the end all is mended: then
every client must go on, every replica must become level, and every storage must verify. The trace tells what happened, in
order; the same plan gives the same trace, byte for byte.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar
from uuid import UUID

import numpy as np

from tests.checker.history import FINAL, UNTIMED, History
from tests.checker.recorder import log_records
from tests.checker.verdict import Verdict, judge
from tests.simulation.clients import ClientMachine
from tests.simulation.coordinator import ZooKeeper
from tests.simulation.deciders import Deciders
from tests.simulation.events import happen
from tests.simulation.faulty_store import Faults, FaultyStore
from tests.simulation.files import archived_runs, batch_files, broken_chain, differences
from tests.simulation.loop import Life, SimLoop, run
from tests.simulation.machines import FIRST_SECOND, ZOOKEEPER, Exited, Machine
from tests.simulation.network import Network
from tests.simulation.operators import OperatorMachine
from tests.simulation.plan import OPERATORS, Event, Plan, names
from tests.simulation.policies import Policies
from tests.simulation.server_machine import ServerMachine
from tests.simulation.storage_machine import StorageMachine
from tests.simulation.subscribers import Subscribers
from tests.simulation.versions import PROGRAMS, Versions
from waltzd.archive.listing import newest_manifests
from waltzd.archive.manifest import LABEL, Entry, Label, pieces_of
from waltzd.archive.unsealed import read_unsealed
from waltzd.archive.upload import PartitionArchive
from waltzd.archive.verification import check_key, check_piece
from waltzd.cluster.cluster import Cluster, archive_path, archived, said
from waltzd.cluster.documents import ArchiveMeta, ClusterMeta, Keep, Membership, ReplicaSets, keep_of
from waltzd.cluster.groups import begin_group_log
from waltzd.disk.seam import join, read_whole
from waltzd.errors import ArchiveAway, CannotConnect, NotReady, WaltzError
from waltzd.errors.operations import ArchiveDamaged, ControlDamaged, NotOwner, PartitionDamaged
from waltzd.format.checksum import crc32
from waltzd.format.finding import HARMLESS_CODES, Code
from waltzd.format.key_index import KeyHeader, LockMarks, LockQuery, MarkColumns, encode_key_index
from waltzd.format.layout import KEY_SUFFIX
from waltzd.format.record import Run, join_runs
from waltzd.protocol.descriptions import OwnedPartition
from waltzd.protocol.document import decode
from waltzd.protocol.locks import MarkedQuery, Mode
from waltzd.protocol.peers import runs_of
from waltzd.protocol.timelines import FIRST
from waltzd.server.clients.pipeline import Pipeline
from waltzd.server.core.step import AHEAD_MAX, OWN_AHEAD_MAX
from waltzd.storage.offline.verify import Options, Target, verify

T = TypeVar("T")
CLOCKS_DIFFER_SECONDS = 60.0
"""What a policy of time may be wrong by: the bounds of two clocks, and clocks that run at different speeds."""
PATIENCE_SECONDS = 60.0
"""After everything is mended, or all that ever will be, this is enough for every client, owner and replica."""
STEPS_MAX = 3_000_000
RESERVED_FROM = 40
"""What stands behind in the header of a segment means nothing, and stays as it is when it is damaged."""


STORE_FAULTS = Faults(lost=5, refused=10, late=3, repeated=5, torn=5, rotten=3)


class Stuck(AssertionError):
    """Everything is mended, and a client, an owner or a replica does not go on."""


class OperatorNeeded(Exception):
    """A partition waits, and has every right to."""


class Broken(AssertionError):
    """Something in there is not what it should be."""


@dataclass
class Outcome:
    plan: Plan
    trace: list[str]
    history: History
    verdict: Verdict | None = None
    failure: BaseException | None = None
    seconds: float = 0.0
    """Of the virtual clock."""
    committed: int = 0
    messages: int = 0
    findings: list[str] = field(default_factory=list)
    waits: str = ""
    """Why a partition had to be left to an operator: the run ended there, and only what came before was judged."""

    @property
    def kind(self) -> str:
        """In a word; empty when nothing is wrong."""
        if self.failure is not None:
            return type(self.failure).__name__
        if self.verdict is not None and not self.verdict.is_sound:
            return "NOT SOUND"
        return ""

    @property
    def story(self) -> str:
        return str(self.failure if self.failure is not None else self.waits or self.verdict)


def simulate(plan: Plan) -> Outcome:
    world = Simulation(plan)
    outcome = Outcome(plan, world.trace, world.history)
    gc.disable()  # what is finalized when must not depend on how much memory there is
    try:
        with world.logs():
            outcome.verdict = run(world.loop, world.story(), world.lives)
    except OperatorNeeded as need:
        outcome.waits = str(need)
    except Exception as error:  # noqa: BLE001  the outcome of a run
        outcome.failure = world.mistakes[0] if world.mistakes else error
    finally:
        gc.enable()
    outcome.seconds = world.ended
    outcome.committed = world.committed
    outcome.messages = world.network.messages
    return outcome


class Simulation:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.setup = plan.setup
        self.pick = random.Random(f"world {plan.seed}")
        self.loop = SimLoop(steps_max=STEPS_MAX)
        self.loop.set_exception_handler(self._unhandled)
        self.trace: list[str] = []
        self.mistakes: list[BaseException] = []
        self.network: Network = Network(
            self.loop,
            f"network {plan.seed}",
            keep_alive_seconds=self.setup.keep_alive_seconds,
            say=self.say,
            on_mistake=self.mistake,
        )
        self.meta = ClusterMeta(
            name="simulated",
            key=UUID(int=self.pick.getrandbits(128), version=4),
            partitions=self.setup.partitions,
            created="in a simulation",
            format=self.setup.format,
            keep_local=self.setup.keep_local,
            level=PROGRAMS[self.setup.versions[0]].level if self.setup.versions else 0,
        )
        self.log_count = self.setup.partitions + (self.setup.members > 0)
        self.network.on_event = self._check_state
        self.zookeeper = ZooKeeper(self)
        everybody = names("storage", self.setup.storages + self.setup.spares)
        self.storages = {name: StorageMachine(self, name) for name in everybody}
        self.servers = {name: ServerMachine(self, name) for name in names("server", self.setup.servers)}
        self.versions = Versions(self) if self.setup.versions else None
        self.zookeeper.tree.versions = self.versions
        self.history = History()
        self.clients: dict[str, ClientMachine] = {
            name: ClientMachine(self, name) for name in names("client", self.setup.clients)
        }
        self.operators = {
            name: OperatorMachine(self, name)
            for name in OPERATORS
            if {"members", "upgrade", "rescue", "versions"} & {*self.setup.faults}
        }
        self.subscribers: Subscribers | None = Subscribers(self) if self.setup.members else None
        has_locks = self.setup.format == 1
        self.deciders = Deciders() if "decisions" in self.setup.faults and has_locks else None
        self.policies = Policies(self) if {"policies", "quotas"} & {*self.setup.faults} else None
        self.store: FaultyStore | None = None
        """Of the archive."""
        if {"archive", "trim", "backup", "age", "vanish", "jumps"} & {*self.setup.faults}:
            self.store = FaultyStore(random.Random(f"store {plan.seed}"), STORE_FAULTS)
        self.vanished: dict[str, None] = {}
        """Objects that somebody has taken out of the store."""
        self.harmed_keys: dict[int, None] = {}
        """Partitions whose key indexes were harmed at the end of the run."""
        self.committed = 0
        self.ended = 0.0
        self.latest_shown = 0
        self.skipped = 0.0
        self._skips = [(0.0, 0.0)]
        """When time was skipped, and all seconds that were until then."""
        self._firsts: dict[tuple[str, int], int] = {}
        """First id of each replica, as it was seen last."""
        self.is_racing = True
        self.is_going_wrong = True
        self._replicas = {number: set(names("storage", self.setup.storages)) for number in range(self.setup.partitions)}
        self._lost: tuple[str, ...] = ()
        """Who will never be well again."""

    # -- what all machines use

    def say(self, who: str, what: str) -> None:
        self.trace.append(f"{self.loop.now:.6f} {who}: {what}")

    def mistake(self, error: BaseException) -> None:
        self.say("simulation", f"a mistake: {error!r}")
        self.mistakes.append(error)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        if not isinstance(error, Exited):
            self.mistake(error if isinstance(error, BaseException) else Broken(str(context)))

    def machines(self) -> dict[str, Machine]:
        members = self.subscribers.machines if self.subscribers is not None else {}
        return {**self.storages, **self.servers, **self.clients, **self.operators, **members}

    def lives(self) -> list[Life]:
        return [life for machine in self.machines().values() for life in machine.lives]

    @contextmanager
    def logs(self) -> Iterator[None]:
        """What the daemons and clients log goes into the trace."""
        root = logging.getLogger("waltz")
        handler = _Listener(self.say)
        level, handlers, is_open = root.level, root.handlers, root.propagate
        root.handlers, root.propagate = [handler], False
        root.setLevel(logging.INFO)
        try:
            yield
        finally:
            root.handlers, root.propagate = handlers, is_open
            root.setLevel(level)

    # -- the story

    async def story(self) -> Verdict:
        await self._build()
        for client in self.clients.values():
            client.start()
        if self.subscribers is not None:
            self.subscribers.start()
        if self.setup.never_mended:  # a first session needs all storages, so it has to be over before some are lost
            await self._until("every partition is open", lambda: "" if self._is_open() else f"only {self._places()}")
        begun = self.loop.now
        for event in self.plan.events:
            if (left := begun + event.at - self.loop.now) > 0:
                await self._pass(left)
            self._happen(event)
        await self._pass(max(0.0, begun + self.setup.seconds - self.loop.now))
        self._mend()
        try:
            await self._all_ends_well()
        except Stuck as stuck:
            await self._check_tolerance(stuck)
            raise
        self.ended = self.loop.now
        self._verify_storages()
        self._check()
        if self.policies is not None:
            self.policies.check()
        for wrong in self.deciders.check(self.history.logs[FINAL]) if self.deciders is not None else ():
            raise Broken(wrong)
        self._forget_times_that_were_not_told()
        verdict = judge(self.history)
        return verdict if self.subscribers is None or not verdict.is_sound else self.subscribers.judged()

    def _forget_times_that_were_not_told(self) -> None:
        """Where an owner's clock was far behind, its clients stop telling it what they have seen."""
        refused = {place for client in self.clients.values() for place in client.tells_no_times}
        for operation in self.history.operations:
            if (operation.client, operation.partition) in refused:
                operation.time_seen = UNTIMED

    async def _pass(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._check()

    def _check_state(self, name: str) -> None:
        machine = self.servers.get(name) or self.clients.get(name)
        if machine is not None:
            machine.check()
        if name in self.storages and "jumps" in self.setup.faults:
            self._check_young(self.storages[name])

    def skip(self, seconds: float) -> None:
        """So much time passes at once, by all clocks that are not wrong."""
        self.skipped += seconds
        self._skips.append((self.loop.now, self.skipped))
        for machine in self.machines().values():
            if machine.life is not None:
                machine.life.ahead += seconds

    def _check_young(self, storage: StorageMachine) -> None:
        """A policy of time keeps what is not as old as it says, whatever the clocks of owners and of a minority of the
        storages show. What was written is at most as old as its request."""
        seconds = (keep_of(self.setup.keep_local) or Keep()).seconds
        if seconds is None or storage.calls is None:
            return
        for replica in storage.calls.directory.partitions():
            begins = self._firsts.get((storage.name, replica.number), 0)
            self._firsts[storage.name, replica.number] = replica.first_id
            if replica.first_id <= begins:
                continue
            for one in self.history.operations:
                if one.partition == replica.number and one.id is not None and begins <= one.id < replica.first_id:
                    asked = one.invoked / 1e9
                    skipped = next(total for at, total in reversed(self._skips) if at <= asked)
                    age = self.loop.now + self.skipped - asked - skipped
                    if age < seconds - CLOCKS_DIFFER_SECONDS:
                        self.mistake(
                            Broken(f"{storage.name} has trimmed id {one.id} of partition {one.partition}, {age:.0f} s old")
                        )

    def _check(self) -> None:
        if self.mistakes:
            raise self.mistakes[0]

    async def _build(self) -> None:
        first = names("storage", self.setup.storages)
        for name, storage in self.storages.items():
            storage.is_wanted = True
            life = storage.begin()
            storage.calls = life.context.run(storage.open)
            if name in first:
                await self.loop.run_in(life, storage.create_partitions(), "partitions")
            self.network.joined(life)
        everywhere = {number: dict.fromkeys(first, Membership.MEMBER) for number in range(self.setup.partitions)}
        coordinator = self.zookeeper.tree.connect()
        await Cluster.create(
            coordinator,
            self.meta,
            storages=[self.storages[name].meta for name in first],
            replicas=ReplicaSets(partitions=everywhere),
        )
        if self.subscribers is not None:
            await begin_group_log(Cluster(coordinator), self.meta, dict.fromkeys(first, Membership.MEMBER))
        await coordinator.close()
        if self.policies is not None:
            self.policies.write()
        for server in self.servers.values():
            server.start()

    # -- what goes wrong

    def _happen(self, event: Event) -> None:
        self.say("PLAN", str(event))
        if self.policies is not None:
            self.policies.note(event)
        happen(self, event)

    def vanish(self, where: float) -> None:
        """Take one segment out of the store that every storage still has."""
        assert self.store is not None
        kept = {number: self._highest_begin(number) for number in range(self.log_count)}
        names = []
        for name in sorted(self.store.objects):
            folder, _, ids = name.partition("/segment/")
            if ids and int(ids.split("-")[0]) >= kept[int(folder.removeprefix("partition-"))]:
                names.append(name)
        if names:
            name = names[int(where * len(names))]
            self.say("store", f"{name} vanishes")
            folder, _, ids = name.partition("/segment/")
            keys = [key for key in self.store.objects if key.startswith(f"{folder}/key/{ids[:39]}")]
            for gone in (name, *keys):
                self.vanished[gone] = None
                del self.store.objects[gone]

    def _highest_begin(self, partition: int) -> int:
        """No storage has a promise to begin above this id."""
        floors = [0]
        entry = self.zookeeper.tree.find(archive_path(partition))
        if entry is not None:
            floors.append(decode(ArchiveMeta, entry.data, archive_path(partition)).floor)
        for storage in self.storages.values():
            if storage.calls is not None:
                replicas = storage.calls.directory.partitions()
                floors += [replica.status().floor for replica in replicas if replica.number == partition]
        return max(floors)

    def lose_when_level(self, storage: StorageMachine) -> None:
        """Its disk becomes empty, if all that others have lost is mended: nothing but this one storage is missing then."""
        if self._is_level():
            self.say(storage.name, "loses its disk while all others are level")
            storage.kill()
            storage.lose_disk()

    def lose_all_but(self, kept: StorageMachine, share: float) -> None:
        """All other storages die, this share of them for good, if this one has all of every partition; and an operator
        begins to rescue what cannot go on."""
        goals = (self._assigned_now(number) for number in range(self.log_count))
        if not self._is_level() or not all(kept.name in goal for goal in goals):
            return
        for storage in self.storages.values():
            if storage is not kept:
                storage.kill()
                if self.pick.random() < share:
                    storage.lose_disk()
        self.say(kept.name, "is the only storage that is left")
        self.operators[OPERATORS[0]].rescue(kept.name)

    def _is_level(self) -> bool:
        """Everything is on every storage that is to have it: its owner says so, which may be hung, and so does the disk."""
        owned = {one.partition: one for _, one in self._descriptions() if one.step == "OPEN"}
        is_level = len(owned) == self.log_count and all(
            replica.counts
            and replica.state == "LIVE"
            and replica.durable_id == one.last_id == self._last_id(replica.storage, one.partition)
            for one in owned.values()
            for replica in one.replicas
        )
        return is_level and all(other.is_up and not other.is_damaged for other in self.storages.values())

    def _last_id(self, storage: str, partition: int) -> int | None:
        calls = self.storages[storage].calls
        replicas = calls.directory.partitions() if calls is not None else []
        return next((replica.last_id for replica in replicas if replica.number == partition), None)

    def _assigned_now(self, partition: int) -> tuple[str, ...]:
        owned = next(one for _, one in self._descriptions() if one.partition == partition and one.step == "OPEN")
        return tuple(replica.storage for replica in owned.replicas)

    def _mend(self) -> None:
        self.say("PLAN", "everything is mended")
        self.is_going_wrong = False
        self._lost = self.setup.never_mended
        self.network.watched.clear()
        self.network.mend_all()
        self.zookeeper.is_up = True
        self.zookeeper.changed()
        for storage in self.storages.values():
            storage.disk.observer = None
            storage.make_room()
            storage.disk_seconds = storage.disk_hangs_until = 0.0
        if self.policies is not None:
            self.policies.give_all()
        for machine in (*self.storages.values(), *self.servers.values()):
            machine.clock_ahead = 0.0
        if self.versions is not None:
            self.versions.mend([name for name in (*self.storages, *self.servers) if name not in self._lost])
        for name, machine in self.machines().items():
            if name in self._lost:
                self._give_up(machine)
                continue
            machine.resume()
            machine.start()

    def _give_up(self, machine: Machine) -> None:
        """It will never be well again."""
        how = self.pick.choice(("dead", "frozen", "cut off"))
        if how == "frozen" and not machine.is_up:  # there is nothing to freeze, and nobody shall start it again
            how = "dead"
        self.say("PLAN", f"{machine.name} stays {how}")
        if how == "dead":
            machine.kill()
        elif how == "frozen":
            machine.pause()
        else:
            for other in (*self.machines(), ZOOKEEPER):
                self.network.cut(machine.name, other)
                self.network.cut(other, machine.name)

    def _is_open(self) -> bool:
        is_open = {owned.partition for _, owned in self._descriptions() if owned.step == "OPEN"}
        return is_open == set(range(self.log_count))

    @property
    def _well_storages(self) -> list[StorageMachine]:
        return [storage for name, storage in self.storages.items() if name not in self._lost]

    # -- what has to be true in the end

    async def _all_ends_well(self) -> None:
        await self._everybody_goes_on()
        await self._moves_end()
        for storage in self._well_storages:
            if storage.is_damaged:
                await self._make_sound(storage)
        await self._race_ends()
        await self._replicas_are_level()
        await self._read_logs()
        if self.subscribers is not None:
            await self._until("the group comes to the end of the log", self.subscribers.missing)

    async def _until(self, what: str, true: Callable[[], str]) -> None:
        """`true` says what is still missing."""
        end = self.loop.now + PATIENCE_SECONDS
        while missing := true():
            self._check()
            if self.loop.now > end:
                raise Stuck(f"{what}, not within {PATIENCE_SECONDS:g} seconds: {missing}")
            await asyncio.sleep(0.05)

    async def _everybody_goes_on(self) -> None:
        before = {name: list(client.committed) for name, client in self.clients.items()}

        def missing() -> str:
            for storage in self._well_storages:
                self._replace_what_is_refused(storage)
            for name, client in self.clients.items():
                for partition, count in enumerate(before[name]):
                    if client.is_wanted and client.committed[partition] < count + 2:
                        return f"{name} commits nothing in partition {partition}; {self._places()}"
            return ""

        await self._until("every client goes on", missing)

    def _check_nothing_is_cut(self) -> None:
        """Owners refuse documents that went back. All that was acknowledged is still on a storage, for an operator."""
        held: dict[tuple[int, int], set[str]] = {}
        for storage in self.storages.values():
            for replica in storage.calls.directory.partitions() if storage.calls is not None else ():
                at = replica.first_id
                while at <= replica.last_id:
                    try:
                        found = replica.read_examined(at, replica.last_id, 1 << 20)
                    except WaltzError:  # damaged there
                        at += 1
                        continue
                    for id_, record in enumerate(log_records(found), at):
                        held.setdefault((replica.number, id_), set()).add(record.key)
                    at = found.last_id + 1
        for operation in self.history.operations:
            if operation.kind != "committed" or operation.id is None or self.setup.keep_local != "all":
                continue
            if operation.key not in held.get((operation.partition, operation.id), ()):
                raise Broken(f"{operation.key} was acknowledged as {operation.id}, and no storage holds it any more")

    async def _check_tolerance(self, stuck: Stuck) -> None:
        """A closed partition may wait for an operator, and that may come out at any time: an open session notices only when
        it saves that its document went back. And where a minority has lost its data, one more replica that a power cut has
        torn is one too many: nothing tells whether it had acknowledged what is missing in it (docs/recovery.md)."""
        end = self.loop.now + PATIENCE_SECONDS / 4
        while not self._is_open() and not self.zookeeper.went_back and self.loop.now < end:
            await asyncio.sleep(0.05)
        if self._is_open():
            return
        if self.zookeeper.went_back:  # it may open later, when a majority answers without the storage that noticed
            self._check_nothing_is_cut()
            raise OperatorNeeded(f"documents went back: {stuck}") from stuck
        torn = {storage.name for storage in self._well_storages if storage.is_torn}
        lost = {name for name, storage in self.storages.items() if name in self._lost or storage.has_lost_data}
        for number in range(self.setup.partitions):
            meta, _ = await self._cluster().partition(number)
            members = set(meta.members) if meta is not None else set()
            if torn & members and 2 * len((lost | torn) & members) >= len(members):
                raise OperatorNeeded(
                    f"{', '.join(sorted(torn))} torn by a power cut, {', '.join(sorted(lost))} without data: {stuck}"
                ) from stuck

    def _cluster(self) -> Cluster:
        """As the documents are at this moment, without a way to them."""
        return Cluster(self.zookeeper.tree.connect())

    async def _moves_end(self) -> None:
        """The last request holds: replicas are where it wants them, and operators have no more to do."""
        if not self.operators:
            return
        left: list[str] = []

        def missing() -> str:
            return (
                "; ".join(left) or f"{', '.join(name for name, one in self.operators.items() if one.is_at_work)} is at work"
            )

        end = self.loop.now + PATIENCE_SECONDS
        while True:
            moves, _ = await self._cluster().moves()
            left = [
                f"partition {number} to {', '.join(goal)}"
                for number, goal in moves.partitions.items()
                if not set(goal) & set(self._lost)
            ]
            if not left and not any(one.is_at_work for one in self.operators.values()):
                break
            if self.loop.now > end and set(self._lost) & set(self.storages):
                break  # what was wanted may need one that is lost
            if self.loop.now > end:
                raise Stuck(f"moves do not end within {PATIENCE_SECONDS:g} seconds: {missing()}; {self._places()}")
            await self._pass(0.2)
        for one in self.operators.values():
            one.kill()
        await self._everybody_goes_on()
        await self._until("every partition is open", lambda: "" if self._is_open() else f"only {self._places()}")
        for partition in range(self.setup.partitions):
            self._assigned(partition)

    def _replace_what_is_refused(self, storage: StorageMachine) -> None:
        """What a daemon does not open again by itself is for an operator."""
        refused = storage.refuses if not storage.is_up else None
        if storage.calls is not None:
            for partition in range(self.setup.partitions):
                try:
                    storage.calls.directory.partition(partition)
                except (ControlDamaged, PartitionDamaged) as error:
                    refused = error
                except WaltzError:
                    continue
        if refused is not None:
            self.say("operator", f"gives {storage.name} an empty disk, because it says: {refused}")
            storage.kill()
            storage.refuses = None
            storage.replace_disk(storage.blank_disk())
            storage.start()

    async def _race_ends(self) -> None:
        self.is_racing = False
        await self._until("clients end", lambda: ", ".join(c.name for c in self.clients.values() if c.is_at_work))

    def _descriptions(self) -> list[tuple[str, OwnedPartition]]:
        return [
            (machine.name, owned)
            for machine in self.servers.values()
            if machine.server is not None and machine.name not in self._lost
            for owned in machine.server.owner.describe()
        ]

    def _places(self) -> str:
        return "; ".join(
            f"{name} has partition {owned.partition}: {owned.step} {owned.waiting} "
            + ", ".join(f"{replica.storage} {replica.state} ({replica.story})" for replica in owned.replicas)
            for name, owned in self._descriptions()
        )

    async def _replicas_are_level(self) -> None:
        if self.zookeeper.went_back:  # a list of replicas may name a storage that was removed since
            self._lost = (*self._lost, *(set(self.storages) - set(await self._cluster().storages())))

        def missing() -> str:
            open_ones = {owned.partition: owned for _, owned in self._descriptions() if owned.step == "OPEN"}
            for partition in range(self.setup.partitions):
                owned = open_ones.get(partition)
                if owned is None or any(
                    (replica.state != "LIVE" or replica.durable_id != owned.last_id) and replica.storage not in self._lost
                    for replica in owned.replicas
                ):
                    return f"replicas of partition {partition}: {self._places()}"
            return ""

        await self._until("every replica is level", missing)

    async def _make_sound(self, storage: StorageMachine) -> None:
        """Damage that nobody has met yet is found by reading everything; the owner heals it while it goes on."""
        end = self.loop.now + PATIENCE_SECONDS
        while (found := await self._first_damage(storage)) is not None:
            self.say("operator", f"meets damage on {storage.name}: {found}")
            self._replace_what_is_refused(storage)
            if self.loop.now > end:
                raise Stuck(f"{storage.name} is still damaged after {PATIENCE_SECONDS:g} seconds: {found}")
            await self._pass(0.5)

    def _assigned(self, partition: int) -> set[str]:
        """Who has a replica, says the owner; one that is just beginning a new session says what it said before."""
        for _, owned in self._descriptions():
            if owned.partition == partition and owned.step == "OPEN":
                self._replicas[partition] = {replica.storage for replica in owned.replicas}
        return self._replicas[partition]

    async def _first_damage(self, storage: StorageMachine) -> WaltzError | None:
        calls, life = storage.calls, storage.life
        if calls is None or life is None:
            return CannotConnect(f"{storage.name} is down")

        async def read_all() -> None:
            """What a verification finds is healed by that; what it does not find, nobody meets afterwards."""
            for partition in range(self.setup.partitions):
                if storage.name not in self._assigned(partition):
                    continue
                for finding in await storage.verified(calls, partition):
                    is_read = finding.code is not Code.DAMAGED_HEADER or (finding.first_byte or 0) < RESERVED_FROM
                    if finding.code not in HARMLESS_CODES and is_read:
                        raise PartitionDamaged(finding.sentence())
                is_known = bool(calls.directory.partition(partition).findings)
                try:
                    async for _ in calls.read(partition, None, calls.directory.partition(partition).first_id, None, 0):
                        pass
                except PartitionDamaged as error:
                    if not is_known:
                        raise Broken(f"verification finds nothing on {storage.name}: {error.message}") from error
                    raise

        try:
            await self.loop.run_in(life, read_all(), "an operator reads everything")
        except WaltzError as error:
            return error
        return None

    async def _read_logs(self) -> None:
        for partition in range(self.setup.partitions):
            committed = await self._read_log(partition)
            for storage in self._well_storages:
                if storage.name in self._assigned(partition):
                    self._read_replica(storage, partition, committed)

    async def _read_log(self, partition: int) -> int:
        """As its owner gives it, and up to where. A planned new session may begin in this very moment: then once more."""
        end = self.loop.now + PATIENCE_SECONDS
        while True:
            try:
                pipeline = self._pipeline(partition)
                committed = pipeline.committed
                floor = await self._check_floor(partition)
                runs: list[Run] = []
                if self.store is not None:
                    runs = archived_runs(self.store, self.meta.key, partition, await self._pieces(partition), floor - 1)
                if floor and (not runs or runs[-1].last_id != floor - 1):
                    raise Broken(f"partition {partition} is trimmed up to {floor - 1}, and its archive does not reach that")
                if committed >= floor:
                    runs += [found async for found in pipeline.read(floor, committed, with_locks=True)]
                if floor > 0:
                    await self._check_read_through(pipeline, committed, runs)
                await self._check_times(pipeline, runs)
                await self._check_marks(pipeline, committed)
                self._check_age(partition, floor, runs)
                await self._check_archive(partition, runs)
                self._check_tail(partition, runs)
                break
            except WaltzError as error:
                if self.loop.now > end:
                    raise Stuck(f"partition {partition} cannot be read: {error}") from error
                await asyncio.sleep(0.1)
        for found in runs:
            self.history.log(partition, log_records(found), first=found.first_id)
        return committed

    async def _pieces(self, partition: int) -> list[Entry]:
        """Of its archive."""
        known = (await archived(self._cluster().coordinator, partition))[0]
        if known is None or self.store is None:
            return []
        store = FaultyStore(objects=self.store.objects)
        label = Label(archive=known.archive, cluster=self.meta.key)
        archive = PartitionArchive(store, label, partition, known.timeline)
        return list(pieces_of(archive.newest(said(known)).entries, archive.chunk))

    async def _check_floor(self, partition: int) -> int:
        """The first id that storages have to have: no storage begins above it, and what is below is archived."""
        found = (await archived(self._cluster().coordinator, partition))[0]
        meta, _ = await self._cluster().partition(partition)
        floor = 0 if found is None else found.floor
        if meta is not None and floor > meta.low_mark + 1 and not self.zookeeper.went_back:
            raise Broken(f"partition {partition} is trimmed up to {floor - 1}, above its low mark {meta.low_mark}")
        for piece in await self._pieces(partition):
            name = piece.name(partition)
            if piece.first < floor and name in self.vanished and self.store is not None and name not in self.store.objects:
                raise Broken(f"partition {partition} is trimmed up to {floor - 1}, and {name} is not in the store")
        for storage in self._well_storages:
            if storage.name in self._assigned(partition) and storage.calls is not None:
                begin = storage.calls.directory.partition(partition).first_id
                if begin > floor:
                    raise Broken(f"partition {partition} begins at {begin} on {storage.name}, and its floor is {floor}")
        return floor

    async def _check_read_through(self, pipeline: Pipeline, last_id: int, runs: Sequence[Run]) -> None:
        """A reader of the whole log gets it from its owner, and goes on where the store has ended a read."""
        found = await self._read_whole(pipeline, last_id)
        read, log = join_runs(found), join_runs(runs)
        if (read.first_id, read.data) != (log.first_id, log.data):
            raise Broken(f"a reader of partition {pipeline.session.partition} got another log than there is")

    async def _check_marks(self, pipeline: Pipeline, last_id: int) -> None:
        """The history of a lock is all and only what marked it: with the marks that the owner has in memory; and without
        them, by key indexes, whatever becomes of these, and below the trim floor."""
        runs = [found for found in await self._read_whole(pipeline, last_id) if found.locks is not None]
        if not self.setup.format or not runs:
            return
        marks: dict[int, list[int]] = {}
        for one in runs:
            assert one.locks is not None
            ids = np.repeat(np.arange(one.first_id, one.last_id + 1), one.locks.counts).tolist()
            for lock, mode, id_ in zip(one.locks.ids.tolist(), one.locks.modes.tolist(), ids, strict=True):
                if mode != Mode.READ and marks.setdefault(lock, [])[-1:] != [id_]:
                    marks[lock].append(id_)
        known = sorted(marks)
        asked = [*dict.fromkeys([*known[:2], *known[len(known) // 2 :][:1], *known[-1:]]), 12345]
        for harm in (False, True):
            if harm:
                self._harm_key_indexes(pipeline.session.partition)
            else:
                await self._check_archived_keys(pipeline.session.partition)
            for lock in asked:
                for newest_first in (False, True):
                    query = LockQuery(
                        lock=lock, first_id=runs[0].first_id, last_id=last_id, limit=10_000, newest_first=newest_first
                    )
                    found = await self._find_marks(pipeline, query, in_memory=not harm)
                    right = marks.get(lock, [])
                    if found != tuple(right[::-1] if newest_first else right):
                        raise Broken(
                            f"the lock {lock} of partition {pipeline.session.partition} was marked by {right}, not {found}"
                        )
        groups = tuple((lock,) for lock in asked[:3])
        wanted = sorted(dict.fromkeys(id_ for lock in asked[:3] for id_ in marks.get(lock, [])))
        for newest_first in (False, True):
            question = MarkedQuery(
                groups=groups, last_id=last_id, limit=3, newest_first=newest_first, first_id=runs[0].first_id
            )
            records = {
                one.first_id + number: bytes(one.data[one.bounds[number] : one.bounds[number + 1]])
                for one in runs
                for number in range(len(one))
            }
            right_records = [records[id_] for id_ in (wanted[::-1] if newest_first else wanted)]
            if await self._find_marked(pipeline, question) != right_records:
                raise Broken(f"the records of partition {pipeline.session.partition} that marked {groups} are not {wanted}")

    async def _find_marked(self, pipeline: Pipeline, query: MarkedQuery) -> list[bytes]:
        """Ask on from where a page ends, also while the archive is away."""
        found: list[bytes] = []
        while True:
            page = await self._patiently(partial(pipeline.find_marked, query))
            found += map(bytes, page.records)
            if page.through is None:
                return found
            if query.newest_first:
                query = replace(query, last_id=page.through - 1)
            else:
                query = replace(query, first_id=page.through + 1)

    async def _find_marks(self, pipeline: Pipeline, query: LockQuery, *, in_memory: bool) -> tuple[int, ...]:
        """Ask on from where an answer ends, also while the archive is away: each answer has at least one id behind it."""
        found: list[int] = []

        async def ask() -> tuple[LockMarks, int]:
            if in_memory:
                return await pipeline.find_marks(query)
            return await pipeline.session.find_marks(query, pipeline.capacity.cold_turns), query.last_id

        while not query.is_done:
            part, end = await self._patiently(ask)
            if not query.first_id <= part.through <= query.last_id or end != query.last_id:
                raise Broken(f"an answer to {query} ends at {part.through} and {end}")
            found += part.ids
            query = query.after(part)
        return tuple(found)

    async def _read_whole(self, pipeline: Pipeline, last_id: int) -> list[Run]:
        found: list[Run] = []

        async def go_on() -> None:
            async for one in pipeline.read(found[-1].last_id + 1 if found else 0, last_id, with_locks=True):
                found.append(one)

        if last_id >= 0:
            await self._patiently(go_on)
        return found

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call again while the archive is away."""
        end = self.loop.now + PATIENCE_SECONDS
        while True:
            try:
                return await call()
            except (ArchiveAway, ArchiveDamaged):
                if self.loop.now > end:
                    raise
                await asyncio.sleep(0.1)

    async def _check_archived_keys(self, partition: int) -> None:
        """Each archived segment of format 1 has the key index that its manifest names."""
        if self.store is None or partition in self.harmed_keys:
            return
        store = FaultyStore(objects=self.store.objects)
        for piece in await self._pieces(partition):
            flaw = check_key(store, partition, piece, is_quick=False)
            if flaw is not None and flaw.name not in self.vanished:
                raise Broken(f"the archive of partition {partition} has another key index {flaw.name}: {flaw.detail}")
            if not piece.key_bytes and self.setup.format and not {"upgrade", "versions"} & {*self.setup.faults}:
                raise Broken(f"{piece.name(partition)} has no key index in its manifest")

    def _harm_key_indexes(self, partition: int) -> None:
        """Lose, damage and swap key indexes on all storages, and in the store."""
        self.harmed_keys[partition] = None
        if self.store is not None:
            prefix = f"partition-{partition}/key/"
            names = sorted(name for name in self.store.objects if name.startswith(prefix))
            objects = [self.store.objects[name] for name in names]
            content = [one.data for one in objects]
            for number, (name, one) in enumerate(zip(names, objects, strict=True)):
                if number % 5 == 0:
                    del self.store.objects[name]
                elif number % 5 == 1:
                    one.data = one.data[:-1500] + bytes(len(one.data[-1500:]))
                elif number % 5 == 2:
                    one.data = content[number - 1]
                elif number % 5 == 3:
                    header = KeyHeader.decode(one.data)
                    assert header is not None
                    one.data = encode_key_index(header, MarkColumns.join([]))  # forged: it hides all marks
        for storage in self._well_storages:
            if storage.calls is None or storage.name not in self._assigned(partition):
                continue
            disk, home = storage.disk, storage.calls.directory.partition(partition).directory
            paths = [join(home, name) for name in disk.names(home) if name.endswith(KEY_SUFFIX)]
            content = [read_whole(disk, path, 1 << 20) for path in paths]
            for number, path in enumerate(paths):
                if number % 4 == 0:
                    disk.remove(path)
                elif number % 4 == 1:
                    disk.corrupt(path, len(content[number]) - 1500, bytes(1500))
                elif number % 4 == 2:
                    with closing(disk.create(path)) as file:
                        file.write(0, content[number - 1])

    async def _check_times(self, pipeline: Pipeline, runs: Sequence[Run]) -> None:
        """What has a time stands behind what has none; no clock was ever so far ahead; and each time is found again."""
        columns = [np.full(len(found), UNTIMED) if found.times is None else found.times for found in runs]
        times = np.concatenate(columns) if columns else np.zeros(0, np.int64)
        if len(times) == 0 or times[-1] == UNTIMED:
            if self.setup.format and len(times):
                raise Broken(f"partition {pipeline.session.partition} has no times")
            return
        if times.max() > self.latest_shown + AHEAD_MAX:
            raise Broken(
                f"partition {pipeline.session.partition} has the time {times.max()}; {self.latest_shown} was shown"
            )
        known = times[times != UNTIMED]
        for time in (0, int(known[len(known) // 2]), int(known[-1]), int(known[-1]) + 1):
            at, found = int((times < time).sum()) - 1, await self._patiently(partial(pipeline.find_time, time))
            if found != at:
                raise Broken(f"the time {time} of partition {pipeline.session.partition} is behind {at}, not {found}")

    def _check_age(self, partition: int, floor: int, runs: Sequence[Run]) -> None:
        """A policy of time keeps what was written in its last seconds, by whatever clock an owner has."""
        seconds = (keep_of(self.setup.keep_local) or Keep()).seconds
        if seconds is None or floor == 0:
            return
        for one in runs:
            newest = -1 if one.times is None or not one.first_id < floor <= one.last_id + 1 else floor - 1 - one.first_id
            if newest >= 0 and one.times is not None and one.times[newest] > self.latest_shown - seconds * 1_000_000:
                raise Broken(f"partition {partition} is trimmed up to {floor - 1}, which is not {seconds} seconds old")

    async def _check_archive(self, partition: int, runs: Sequence[Run]) -> None:
        """All that the newest manifest leads to is in the store, and is the log from its first record on."""
        known = (await archived(self._cluster().coordinator, partition))[0]
        if known is None or self.store is None:
            return
        store, label = FaultyStore(objects=self.store.objects), Label(archive=known.archive, cluster=self.meta.key)
        log = join_runs(runs)
        for piece in await self._pieces(partition):
            flaw = check_piece(store, label, partition, piece, is_quick=False)
            start, end = (int(log.bounds[id_ - log.first_id]) for id_ in (piece.first, piece.last + 1))
            if piece.name(partition) in self.vanished and piece.name(partition) not in store.objects:
                continue  # `_check_floor` has seen that storages have its ids
            if flaw is not None or crc32(log.data[start:end]) != piece.crc:
                raise Broken(f"the archive of partition {partition} has other ids {piece.first} to {piece.last}: {flaw}")

    def _check_tail(self, partition: int, runs: Sequence[Run]) -> None:
        """All that `tail.json` counts is in the store, and is the log, without a gap behind the newest manifest."""
        if self.store is None or LABEL not in self.store.objects:
            return
        store = FaultyStore(objects=self.store.objects)
        label = Label.decode(store.objects[LABEL].data, "the store")
        newest = newest_manifests(store, label, [partition]).get(partition)
        archive = PartitionArchive(store, label, partition, FIRST if newest is None else newest.timeline)
        manifest, tail, parts = read_unsealed(archive, archive.start())
        reached, log = manifest.last, join_runs(runs) if runs else None
        for part in parts:
            slot = part.slot
            if log is None or slot.last > log.last_id or slot.first > reached + 1:
                raise Broken(f"the tail of partition {partition} has ids {slot.first} to {slot.last} behind id {reached}")
            start, end = (int(log.bounds[id_ - log.first_id]) for id_ in (slot.first, slot.last + 1))
            found = b"".join(bytes(run.data) for run in runs_of(part.content()))
            if found != bytes(log.data[start:end]):
                raise Broken(f"the tail of partition {partition} has other records {slot.first} to {slot.last}")
            reached = slot.last
        if tail is not None and not {"skew", "age", "halt"} & {*self.setup.faults}:
            # an owner's clock may be ahead of the storages' clocks, which it advances by a clock that runs too fast
            runs_ahead = round(1e6 * self.setup.drift * asyncio.get_running_loop().time())
            ahead = OWN_AHEAD_MAX + runs_ahead if "jumps" in self.setup.faults else 0
            moment = round(1e9 * ((tail.moment - ahead) / 1e6 - FIRST_SECOND))
            for operation in self.history.operations:
                is_before = operation.returned is not None and operation.returned <= moment
                if operation.partition == partition and operation.kind == "committed" and is_before:
                    assert operation.id is not None
                    if operation.id > reached:
                        raise Broken(
                            f"the tail of partition {partition} reaches {reached} and says that it is whole up to "
                            f"{tail.moment}; {operation.key} was acknowledged as {operation.id} before that"
                        )

    def _pipeline(self, partition: int) -> Pipeline:
        for machine in self.servers.values():
            if machine.server is not None and machine.name not in self._lost:
                try:
                    return machine.server.owner.pipeline(partition, None)
                except (NotOwner, NotReady):
                    continue
        raise NotReady(f"nobody has partition {partition} open: {self._places()}")

    def _read_replica(self, storage: StorageMachine, partition: int, committed: int) -> None:
        assert storage.calls is not None
        replica = storage.calls.directory.partition(partition)
        at = replica.first_id
        while at <= committed:
            found = replica.read(at, committed, 1 << 20, session=replica.promised_session)
            self.history.log(partition, log_records(found), first=at, source=storage.name)
            at = found.last_id + 1

    def _verify_storages(self) -> None:
        """What is on the disks, read as the offline tool reads it, after all daemons were killed. Where bytes were damaged,
        the records were compared already, and what nobody ever reads stays damaged."""
        for server in self.servers.values():
            server.kill()
        for storage in self._well_storages:
            storage.kill()
            report = verify(storage.disk, [Target(storage=storage.name)], Options(key=self.meta.key))
            if report.findings and not storage.is_damaged:
                raise Broken(f"{storage.name} does not verify: {'; '.join(map(str, report.findings))}")
        for partition in range(self.setup.partitions):
            self._compare_files(partition)

    def _compare_files(self, partition: int) -> None:
        """Segments of format 1 are the same everywhere, from the first that all have."""
        replicas = {
            storage.name: batch_files(storage.disk, f"{storage.name}/{partition}")
            for storage in self._well_storages
            if storage.name in self._assigned(partition) and not storage.is_damaged
        }
        wrong = [*differences(replicas)]
        is_trimmed = self.setup.keep_local != "all"
        wrong += [
            f"{name}: {found}" for name, files in replicas.items() for found in broken_chain(files, is_trimmed=is_trimmed)
        ]
        if wrong:
            raise Broken(f"partition {partition}: {'; '.join(wrong)}")


class _Listener(logging.Handler):
    def __init__(self, say: Callable[[str, str], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.name, record.getMessage())
