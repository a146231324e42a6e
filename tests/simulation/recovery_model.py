"""The decisions of recovery and session against storages that are three numbers and a list, in any order of events.

Owners come at any time and never go away by themselves: a deposed one keeps sending until a storage or the coordinator
refuses it. Storages stop, come back, lose everything, or come back as an older copy, also as one that looks like
themselves, or with a hole in the middle of what they held; members come and go; the coordinator is put back to what it held
before. After every step: what was committed once is at its place in every log that a later session opens with, for ever.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from uuid import UUID

from waltzd.cluster.documents import Membership, PartitionMeta, acknowledging, closing, following, losing
from waltzd.format.batch import End
from waltzd.format.finding import Code, Finding
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.quorum import majority
from waltzd.server.core.progress import Marks
from waltzd.server.core.recovery import Copy, Foreign, Heal, Level, Recovery, SetLowMark, Step, Truncate

Entry = tuple[int, int]
"""Which owner wrote it, and its number there: no two are the same."""


class Violation(AssertionError):
    pass


class Refused(Exception):
    """By a storage or the coordinator: this owner is over."""


@dataclass
class Disk:
    incarnation: UUID
    promised: int = -1
    session: int = -1
    low_mark: int = -1
    local_low_mark: int = -1
    committed: int = -1
    log: list[Entry] = field(default_factory=list)
    holes: set[int] = field(default_factory=set)
    """Ids whose records cannot be read any more. What stood there is still in `log`, for us only."""
    before: tuple[int, int, int] = (-1, -1, -1)
    """Session and marks of the session before: the other half of the control file."""
    is_up: bool = True

    @property
    def last_id(self) -> int:
        return len(self.log) - 1

    def status(self) -> ReplicaStatus:
        return ReplicaStatus(
            partition=0, incarnation=self.incarnation, promised_session=self.promised, session=self.session,
            low_mark=self.low_mark, local_low_mark=self.local_low_mark, committed=self.committed, last_id=self.last_id,
            is_available=True, is_full=False, segments=1, damaged_segments=(0,) if self.holes else (),
            findings=tuple(
                Finding(code=Code.DAMAGED_RECORD, path="0.seg", detail="x", first_id=id_, last_id=id_)
                for id_ in sorted(self.holes)
            ),
            end=End(crc=zlib.crc32(repr(self.log).encode())) if self.log else None,
        )  # fmt: skip

    def copy(self) -> Disk:
        return replace(self, log=list(self.log), holes=set(self.holes))

    def cut(self, mark: int) -> None:
        del self.log[mark + 1 :]
        self.holes = {id_ for id_ in self.holes if id_ <= mark}


class World:
    def __init__(self, seed: int, names: int) -> None:
        self.random = random.Random(seed)
        self.incarnations = 0
        self.names = [f"s{number}" for number in range(names)]
        self.disks = {name: Disk(self.new_incarnation()) for name in self.names}
        self.backups: dict[str, Disk] = {}
        self.meta: PartitionMeta | None = None
        self.version = 0
        self.roles: dict[str, Membership] = dict.fromkeys(self.names[: min(3, names)], Membership.MEMBER)
        self.owners: list[Owner] = []
        self.committed: list[Entry] = []
        self.opened = 0
        self.forgotten = 0
        self.trace: list[str] = []
        self.may_go_back = seed % 4 == 3
        self.may_forget = seed % 3 > 0 and not self.may_go_back
        self.may_tear = seed % 2 > 0
        self.mended = 0
        self.kept: tuple[PartitionMeta, dict[str, Membership]] | None = None
        self.newest: tuple[PartitionMeta, dict[str, Membership]] | None = None
        """What the coordinator held before it was put back."""
        self.refused = 0

    def new_incarnation(self) -> UUID:
        self.incarnations += 1
        return UUID(int=self.incarnations)

    def say(self, what: str) -> None:
        self.trace.append(what)

    def save(self, meta: PartitionMeta, version: int) -> int:
        if version != self.version:
            raise Refused("somebody else saved")
        self.meta, self.version = meta, self.version + 1
        return self.version

    def note_committed(self, log: list[Entry], mark: int) -> None:
        known = min(len(self.committed), mark + 1)
        if log[:known] != self.committed[:known]:
            raise Violation(f"committed {self.committed[:known]}, now {log[:known]}")
        self.committed.extend(log[len(self.committed) : mark + 1])

    # -- events

    def step(self) -> None:
        choice = self.random.random()
        if choice < 0.01 or not self.owners:
            self.owners.append(Owner(self, len(self.owners)))
        elif choice < 0.04:
            disk = self.pick(self.disks)
            self.disks[disk].is_up = not self.disks[disk].is_up
            self.say(f"{disk} {'up' if self.disks[disk].is_up else 'down'}")
        elif choice < 0.045 and self.may_forget:
            self.forget(self.pick(self.disks))
        elif choice < 0.048 and self.may_tear:
            self.tear(self.pick(self.disks))
        elif choice < 0.049 and self.may_forget:
            self.lose_struct(self.pick(self.disks))
        elif choice < 0.05:
            name = self.pick(self.disks)
            self.backups[name] = self.disks[name].copy()
        elif choice < 0.054 and self.may_forget:
            self.put_back_in_place(self.pick(self.disks))
        elif choice < 0.062 and self.newest is None:  # nobody moves replicas while the coordinator is behind
            self.change_roles()
        elif choice < 0.064 and self.may_go_back:
            self.go_back()
        else:
            recent = self.owners[-3:]
            recent[-1 if self.random.random() < 0.8 else self.random.randrange(len(recent))].step()

    def pick(self, things: Mapping[str, object]) -> str:
        return self.random.choice(sorted(things))

    def forget(self, name: str) -> None:
        self.forgotten += 1
        backup = self.backups.get(name)
        self.disks[name] = Disk(self.new_incarnation())
        if backup is not None and self.random.random() < 0.7:
            self.disks[name] = replace(backup.copy(), incarnation=self.new_incarnation())
        self.say(f"{name} came back with ids up to {self.disks[name].last_id}")

    def put_back_in_place(self, name: str) -> None:
        """Below the file system: its incarnation is still the same. The coordinator knows that it held more."""
        backup, meta = self.backups.get(name), self.meta
        state = None if meta is None else meta.replicas.get(name)
        if backup is None or meta is None or state is None or backup.incarnation != self.disks[name].incarnation:
            return
        is_known = state.incarnation == backup.incarnation and name in meta.joined
        if is_known and (backup.session < meta.opened or backup.last_id < state.acknowledged):
            self.disks[name] = backup.copy()
            self.forgotten += 1
            self.say(f"{name} went back to ids up to {backup.last_id}")

    def tear(self, name: str) -> None:
        """It loses power, and comes back with a hole in front of its last record."""
        disk = self.disks[name]
        if disk.last_id < 1:
            return
        disk.is_up = False
        first = self.random.randrange(max(0, disk.last_id - 6), disk.last_id)
        disk.holes |= set(range(first, self.random.randint(first + 1, disk.last_id)))
        self.say(f"{name} is torn at {sorted(disk.holes)} of {disk.last_id}")
        if self.random.random() < 0.8:  # the owner was on the same machine, and both are started again at once
            disk.is_up = True
            self.owners.append(Owner(self, len(self.owners)))

    def lose_struct(self, name: str) -> None:
        """It goes down, and comes back with the older half of its control file only."""
        disk = self.disks[name]
        disk.is_up = False
        disk.session, disk.low_mark, disk.local_low_mark = disk.before
        self.say(f"{name} is down, and has forgotten what it has begun after session {disk.session}")

    def go_back(self) -> None:
        """The coordinator is put back to an older copy of what it held; later to what it held before that."""
        if self.meta is None:
            return
        now = (self.meta, dict(self.roles))
        if self.newest is not None:
            if self.meta.opened == self.newest[0].opened and self.random.random() < 0.7:
                return
            then, self.newest, self.kept = self.newest, None, None
        elif self.kept is None or self.random.random() < 0.5:
            self.kept = now
            return
        elif self.kept[0].session == self.meta.session:
            return
        else:
            then, self.newest = self.kept, now
        self.meta, self.version = then[0], self.version + 1
        if self.random.random() < 0.7:
            self.set_roles(then[1])
        self.say(f"the coordinator knows session {self.meta.session} now, and did know {now[0].session}")

    def set_roles(self, roles: dict[str, Membership]) -> None:
        self.roles = roles
        for owner in self.owners:
            owner.core.roles = dict(sorted(roles.items()))

    def refuse(self, owner: Owner, why: str) -> None:
        """Documents that are still what the owner saved last are behind."""
        if self.version == owner.version:
            if not self.may_go_back:
                raise Violation(f"owner {owner.number} refuses without a reason: {why}")
            self.refused += 1
        raise Refused(why)

    def change_roles(self) -> None:
        wanted = self.random.sample(self.names, self.random.randint(1, min(4, len(self.names))))
        self.roles = {
            name: self.roles.get(name, Membership.LEARNER if self.random.random() < 0.7 else Membership.MEMBER)
            for name in wanted
        }
        if Membership.MEMBER not in self.roles.values():
            self.roles[wanted[0]] = Membership.MEMBER
        self.say(f"roles {self.roles}")
        self.set_roles(self.roles)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def heal(self) -> None:
        """Everything is up and nothing goes wrong any more: as long as nobody forgot anything, the log opens again."""
        for disk in self.disks.values():
            disk.is_up = True
        owner = Owner(self, len(self.owners))
        self.owners.append(owner)
        for _ in range(400):
            owner.step()
            if owner.live is not None:
                return
        raise Violation(f"session {owner.core.session} does not open: {owner.core.waiting()}")


class Owner:
    """What the shells do, one small step at a time."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        meta = world.meta
        mine = PartitionMeta(generation=number, session=1) if meta is None else replace(
            meta, generation=number, session=meta.session + 1
        )  # fmt: skip
        self.version = world.version
        self.core = Recovery(mine, world.roles, is_taken=False)
        self.core.patience_left = False
        self.asked: set[str] = set()
        self.live: Marks | None = None
        self.log: list[Entry] = []
        self.is_over = False

    def step(self) -> None:
        if self.is_over:
            return
        try:
            self._step()
        except Refused as why:
            self.is_over = True
            self.world.say(f"owner {self.number} is over: {why}")
        self.check()

    def check(self) -> None:
        self.core.check()
        if self.live is not None:
            self.live.check()

    def _step(self) -> None:
        world, core = self.world, self.core
        refusal = core.refusal
        if refusal is not None:
            world.refuse(self, refusal.message)
        if not core.is_taken and core.has_asked_enough:
            self.version = world.save(core.meta, self.version)
            core.is_taken = True
            world.say(f"owner {self.number} takes session {core.session}")
            return
        if self.live is None and core.step is Step.OPEN:
            self._open()
            return
        wanted = core.next_save() if self.live is None else None
        if wanted is not None and world.random.random() < 0.5:
            if wanted.opened == core.session:
                promoted = {n: Membership.MEMBER if n in wanted.members else role for n, role in world.roles.items()}
                if promoted != world.roles and set(world.roles) != set(core.roles):
                    raise Refused("the replica sets changed")
                world.roles = promoted
            self._save(wanted)
            return
        if self.live is not None and world.random.random() < 0.05:
            self._save(acknowledging(core.meta, self.live.acknowledged))
            return
        if self.live is not None and world.random.random() < 0.2:
            self.log.extend((self.number, len(self.log) + n) for n in range(world.random.randint(1, 3)))
            return
        name = world.random.choice(core.names)
        self._serve(name)

    def _save(self, wanted: PartitionMeta) -> None:
        self.version = self.world.save(wanted, self.version)
        is_admission = wanted.opened == self.core.session != self.core.meta.opened
        self.core.saved(wanted)
        if is_admission:
            self._admitted()

    def _open(self) -> None:
        self.live = self.core.marks()

    def _admitted(self) -> None:
        """At this moment the session may write: nobody has taken a newer one."""
        world, meta = self.world, self.core.meta
        mark = meta.low_mark
        if mark + 1 < len(world.committed):
            raise Violation(
                f"session {meta.opened} opens at {mark}, but ids up to {len(world.committed) - 1} are committed"
            )
        logs = [
            disk.log[: mark + 1]
            for name in meta.joined
            if (disk := world.disks[name]).incarnation == meta.replicas[name].incarnation
        ]
        if len(meta.joined) < majority(len(meta.members)):
            raise Violation(f"session {meta.opened} opens with {meta.joined} of {meta.members} level")
        if not logs:
            raise Refused("all members came back without what they held")
        if any(log != logs[0] or len(log) != mark + 1 for log in logs):
            raise Violation(f"the members of session {meta.opened} do not hold the same log")
        self.log = list(logs[0])
        world.note_committed(self.log, mark)
        world.opened += 1
        world.say(f"session {meta.opened} opens at {mark} with {meta.members}, joined {meta.joined}")

    def _disk(self, name: str) -> Disk:
        disk = self.world.disks[name]
        if not disk.is_up:
            raise ConnectionError
        if self.core.is_taken and disk.promised > self.core.session:
            self.world.refuse(self, f"{name} is promised to session {disk.promised}")
        return disk

    def _serve(self, name: str) -> None:
        core = self.core
        try:
            disk = self._disk(name)
            if name not in self.asked:
                self.asked.add(name)
                core.asked(name, disk.status())
                return
            if not core.is_taken:
                return
            status = core.status(name)
            if status is None or status.incarnation != disk.incarnation or disk.promised < core.session:
                disk.promised = core.session
                self._opened(name, disk)
                return
            if (disk.holes and status.is_sound) or disk.session != status.session:  # it was started anew meanwhile
                self._opened(name, disk)
                return
            self._work(name, disk)
        except ConnectionError:
            if not core.is_taken:
                self.asked.discard(name)
            core.silent(name)

    def _opened(self, name: str, disk: Disk) -> None:
        core = self.core
        is_lost = core.has_joined(name) and (
            disk.session != core.session or (self.live is not None and core.progress(name).acknowledged > disk.last_id)
        )
        core.opened(name, disk.status())
        if is_lost and self.live is not None:
            self.live.lose(name)
            wanted = losing(core.meta, name, core.progress(name).acknowledged)
            if wanted is not None:
                self._save(wanted)

    def _work(self, name: str, disk: Disk) -> None:
        world, core = self.world, self.core
        match core.next_for(name):
            case Foreign(why):
                raise Violation(f"{name} is taken for forged: {why}")
            case Truncate(mark):
                if mark < max(disk.low_mark, disk.committed):
                    raise Violation(f"{name} is asked to cut above {mark}, its floor is {disk.low_mark}, {disk.committed}")
                if disk.session == core.session:
                    raise Violation(f"{name} is asked to cut after the session began")
                disk.cut(mark)
                core.changed(name, disk.status())
            case Heal(segment, last_id, sources):
                assert segment == 0
                self._heal(name, disk, last_id, self._source(sources))
                core.changed(name, disk.status())
            case SetLowMark(mark):
                if disk.last_id > max(mark, disk.committed) or mark < disk.low_mark:
                    raise Violation(f"{name}: low mark {mark} with {disk.last_id}, {disk.low_mark}")
                if disk.session != core.session:
                    disk.before = (disk.session, disk.low_mark, disk.local_low_mark)
                disk.session, disk.low_mark, disk.local_low_mark = core.session, mark, disk.last_id
                core.changed(name, disk.status())
            case Copy(last_id, sources):
                source = self._source(sources)
                upto = min(last_id, disk.last_id + world.random.randint(1, 4), source.last_id)
                disk.log.extend(source.log[disk.last_id + 1 : upto + 1])
                core.copied(name, disk.last_id)
            case Level():
                if self.live is not None:
                    self._follow(name, disk)

    def _source(self, sources: Sequence[str]) -> Disk:
        source = self._disk(sources[0])
        if source.promised != self.core.session or source.holes:
            raise ConnectionError  # it was not opened by us, or has been started anew: it refuses to be read
        return source

    def _heal(self, name: str, disk: Disk, last_id: int, source: Disk) -> None:
        """As a storage does it: the file takes the place of the whole log, as long as nothing certain is lost by that."""
        core = self.core
        end = min(last_id, source.last_id)
        if end < max(disk.low_mark, disk.committed) or (disk.session == core.session and end < disk.last_id):
            raise ConnectionError
        is_voting = core.mark is None and name in core.meta.joined
        if is_voting and disk.log != source.log[: len(disk.log)]:
            raise Violation(f"{name} is mended with other records than it held, and votes with them")
        disk.log, disk.holes = source.log[: end + 1], set()
        self.world.mended += is_voting

    def _follow(self, name: str, disk: Disk) -> None:
        core, live = self.core, self.live
        assert live is not None
        if disk.log != self.log[: len(disk.log)]:
            raise Violation(f"{name} holds {disk.log}, the owner has {self.log[: len(disk.log)]}")
        disk.log.extend(self.log[len(disk.log) : len(disk.log) + self.world.random.randint(1, 3)])
        disk.committed = max(disk.committed, min(live.committed, disk.last_id))
        core.copied(name, disk.last_id)
        if not live.counts(name):
            if self.world.random.random() < 0.1:
                self._renew()
        elif live.acknowledge(name, disk.last_id):
            self.world.note_committed(self.log, live.committed)

    def _renew(self) -> None:
        """Begin a planned session, so that a replica that came later counts, if a majority holds all that was written."""
        core, live, mark = self.core, self.live, len(self.log) - 1
        assert live is not None
        ours = {name: status for name, status in core.statuses.items() if status.session == core.session}
        holding = [name for name in live.members if name in ours and core.held(name) >= mark]
        if len(holding) < majority(len(live.members)):
            return
        copies = {name: ours[name].incarnation for name in holding if not live.counts(name)}
        after = following(closing(core.meta, mark, copies))
        self.version = self.world.save(after, self.version)
        end = End(crc=zlib.crc32(repr(self.log).encode())) if self.log else None
        self.core = Recovery(after, self.world.roles, ours=core.incarnations, end=end)
        self.core.patience_left = False
        self.live, self.asked = None, set()
        self.world.say(f"owner {self.number} goes on with session {after.session}, closed at {mark}, with copies {copies}")
