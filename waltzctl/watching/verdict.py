"""Whether a cluster is well, and if not, why: sentences that name the partition, the replica, the cause and the next step.

Pure: it judges a picture (`picture`) that somebody else has made. What has one cause is one reason, however many
partitions suffer from it. Since when something holds nobody in the cluster writes down; what is told is since when whoever
looks has seen it without interruption.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from waltzctl.blueprint import ZOOKEEPER
from waltzctl.numbers import spell
from waltzctl.picture.picture import PartitionView, Picture, ServerView, StorageView
from waltzd.cluster.assignment import spell_numbers
from waltzd.cluster.documents import Role
from waltzd.errors import BadMetadata, CannotConnect, ForeignCluster, NodeMissing, TlsMismatch, WaltzError
from waltzd.protocol.quorum import majority

SLOW_MS = 1000.0
"""Whoever answers after more than this is named: something is wrong with it, or with the way to it."""
GONE = "the owner is gone"
_WHEN_SHORT = dict.fromkeys(
    ("CONNECTING", "SETTLING", "CATCHING_UP", "SLOW", "DAMAGED", "UNKNOWN"), "wait until it is level"
) | {"GIVEN_UP": "bring it back from the others: `waltzctl storage recover {0}`"}
"""By the state in which an owner sees a replica."""
MEND = (
    "an owner writes its partition's documents anew by itself; write a storage's anew with `waltzctl storage add "
    "NAME=LISTEN,ADMIN,GROUP`"
)
REPAIR = "start it again, or see why its machine does not answer"


class Health(enum.StrEnum):
    HEALTHY = "HEALTHY"
    DEGRADED = "DEGRADED"
    """Something is not as it should be, or some partitions take no transactions."""
    DOWN = "DOWN"
    """No partition takes transactions."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    key: str
    """What it is about, the same at every look."""
    sentence: str
    next_step: str
    since: str | None = None
    """Seen without interruption since then."""
    stops: bool = False
    """These partitions take no transactions."""
    partitions: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    """Of processes."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    health: Health
    sentence: str
    reasons: tuple[Reason, ...]

    @property
    def is_healthy(self) -> bool:
        return self.health is Health.HEALTHY


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The coordinator does not answer."""

    cause: WaltzError
    seen: str | None
    """When it did last, as far as whoever looks knows."""


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """One look at a cluster, and what is to be said of it."""

    picture: Picture
    verdict: Verdict
    lost: Lost | None
    """Why the coordinator was left out."""
    coordinator_ms: float | None
    """How long it took to read all documents there; None when it did not answer."""
    at: str
    milliseconds: float
    """Of the whole look."""


def judge(
    found: Picture,
    *,
    lost: Lost | None = None,
    down: Sequence[str] = (),
    unlisted: Mapping[str, int] | None = None,
    repair: str = REPAIR,
) -> Verdict:
    """`down`: processes that are known not to run; `unlisted`: servers that are known to run, by their process numbers, and
    that the coordinator does not have; `repair`: what brings a process back."""
    reasons = [
        *_coordination(found, lost, repair if ZOOKEEPER in down else "bring ZooKeeper back"),
        *_silent(found, [name for name in down if lost is None or name != ZOOKEEPER], repair),
        *_missing(found, {*down, *(unlisted or {})}, repair),
        *_unlisted(unlisted or {}, repair),
        *_closed(found, down, repair),
        *_lonely(found),
        *_short(found, down),
        *_replicas(found),
        *_servers(found, lost),
        *_slow(found),
        *_documents(found),
        *_moves(found),
    ]
    reasons.sort(key=lambda reason: not reason.stops)
    opened = len(found.partitions) - len(found.closed)
    if not reasons:
        health = Health.HEALTHY
    elif not opened:
        health = Health.DOWN
    else:
        health = Health.DEGRADED
    return Verdict(health=health, sentence=_sentence(found, opened), reasons=tuple(reasons))


def with_since(reasons: Iterable[Reason], before: Mapping[str, str], now: str) -> tuple[tuple[Reason, ...], dict[str, str]]:
    """With the moment at which each was first seen, and what to remember for the next look."""
    told = tuple(replace(reason, since=before.get(reason.key, now)) for reason in reasons)
    return told, {reason.key: reason.since or now for reason in told}


def _sentence(found: Picture, opened: int) -> str:
    total = max(len(found.partitions), found.meta.partitions)
    partitions = "1 partition is open" if (opened, total) == (1, 1) else f"{opened} of {total} partitions are open"
    if opened == total > 1:
        partitions = f"all {total} partitions are open"
    servers, registered = sum(view.error is None for view in found.servers), len(found.servers) + len(found.missing)
    storages = sum(view.error is None for view in found.storages)
    who = f"{_of(servers, registered, 'server')} and {_of(storages, len(found.storages), 'storage')}"
    return f"{partitions}; {who} answer"


def _of(some: int, total: int, noun: str) -> str:
    name = noun if total == 1 else noun + "s"
    return f"{total} {name}" if some == total else f"{some} of {total} {name}"


# -- one kind of reason after the other --------------------------------------------------------------------------------


def _coordination(found: Picture, lost: Lost | None, repair: str) -> Iterator[Reason]:
    if lost is not None:
        seen = f"; it was last seen from here at {lost.seen}" if lost.seen else ""
        if isinstance(lost.cause, NodeMissing | BadMetadata):
            yield Reason(
                key="documents",
                sentence=f"ZooKeeper answers, and documents of this cluster are not there or cannot be read: "
                f"{lost.cause.message}{seen}. What owners and storages say is shown; owners go on with the sessions that "
                "they have, and nothing can change hands",
                next_step="restart no server; put the newest copy of ZooKeeper's data back. Make no second cluster over "
                "this one: its storages hold what was committed",
            )
            return
        yield Reason(
            key="coordinator",
            sentence=f"ZooKeeper does not answer: {lost.cause.message}{seen}. What owners and storages say is shown; "
            "owners go on, and nothing can change hands",
            next_step=repair,
        )
    elif not found.servers:
        yield Reason(key="servers", sentence="no server is up, so nobody owns the partitions", next_step="start a server")
    elif found.leader is None:
        yield Reason(
            key="leader",
            sentence="no server is the leader, so nobody gives partitions to servers",
            next_step="wait for one session with ZooKeeper; if it lasts, look at `waltzctl events --level warning`",
        )
    if len(found.partitions) != found.meta.partitions:
        yield Reason(
            key="assignment",
            sentence=f"the assignment names {len(found.partitions)} of {found.meta.partitions} partitions: somebody has "
            "changed that document by hand, and nobody owns the others",
            next_step="put the document `assignment` back as it was; `waltzctl history` says who did what lately",
            stops=True,
        )


def _silent(found: Picture, down: Sequence[str], repair: str) -> Iterator[Reason]:
    there: list[tuple[str, ServerView | StorageView]] = [
        *(("server", view) for view in found.servers),
        *(("storage", view) for view in found.storages),
    ]
    mentioned = set()
    for kind, view in there:
        name, error = view.meta.name, view.error
        if error is None:
            continue
        mentioned.add(name)
        touched = _touched(found, name)
        if name in down:
            cause = f"{kind} {name} does not run"
        elif isinstance(error, ForeignCluster):
            cause = f"{kind} {name} is not of this cluster: {error.message}"
        elif isinstance(error, CannotConnect):
            seconds = error.facts.get("seconds")
            why = f": {error.message}" if seconds is None else f" within {seconds} seconds"
            cause = f"{kind} {name} does not answer at {view.meta.admin_listen}{why}"
        else:
            cause = f"{kind} {name} refuses to say how it is: {error.code} {error.message}"
        if touched and kind == "storage":
            cause += f". It has a replica of {spell(touched)}"
        if isinstance(error, ForeignCluster):
            step = f"correct the address of {name}, or start the right process there"
        elif isinstance(error, TlsMismatch):
            step = error.detail_next_step
        elif name in down or (isinstance(error, CannotConnect) and repair == REPAIR):
            step = repair
        elif isinstance(error, CannotConnect):
            step = f"its process runs: see what it says with `waltzctl logs --daemon {name}`"
        else:
            step = error.detail_next_step
        yield Reason(
            key=f"silent {name}",
            sentence=cause,
            next_step=step,
            partitions=touched,
            names=(name,),
        )
    for name in down:
        if name not in mentioned:
            yield Reason(key=f"silent {name}", sentence=f"{name} does not run", next_step=repair, names=(name,))


def _missing(found: Picture, told: Collection[str], repair: str) -> Iterator[Reason]:
    """Servers that were there once. `told`: of whom more is known."""
    for meta in found.missing:
        if meta.name not in told:
            yield Reason(
                key=f"missing {meta.name}",
                sentence=f"server {meta.name} is not up: it was at {meta.admin_listen}, and ZooKeeper has lost it",
                next_step=f"{repair}; if it is not to come back: `waltzctl server remove {meta.name}`",
                names=(meta.name,),
            )


def _unlisted(unlisted: Mapping[str, int], repair: str) -> Iterator[Reason]:
    """Whoever stands still, or is cut off, for longer than its session lasts, is taken off the list, and nobody asks it."""
    for name, pid in sorted(unlisted.items()):
        yield Reason(
            key=f"unlisted {name}",
            sentence=f"server {name} runs (process {pid}), and ZooKeeper does not have it: it stands still, has lost "
            "contact, or has only just been started",
            next_step=f"wait a moment; a process that stands still is ended with `kill -9 {pid}` and comes back with "
            f"`{repair}`",
            names=(name,),
        )


def _touched(found: Picture, name: str) -> tuple[int, ...]:
    return tuple(view.partition for view in found.partitions if name in view.replicas or name == view.owner)


def _closed(found: Picture, down: Sequence[str], repair: str) -> Iterator[Reason]:
    grouped: dict[str, list[PartitionView]] = {}
    up = {view.meta.name for view in found.servers}
    for view in found.closed:
        is_gone = view.owner is not None and view.owner not in up
        grouped.setdefault(GONE if is_gone else view.waiting, []).append(view)
    silent = {*found.silent, *down}
    for waiting, views in grouped.items():
        numbers = tuple(view.partition for view in views)
        owners = sorted({view.owner for view in views if view.owner is not None})
        missing = sorted({name for view in views for name in view.replicas if name in silent})
        needed = majority(len(views[0].replicas))
        cause = f"{GONE} ({', '.join(owners)}), and no other server has taken over" if waiting == GONE else _why(views)
        refusing = sorted(views[0].refusing)
        if not found.servers:
            step = "start a server"
        elif refusing and views[0].owner_says_open:
            step = f"bring those on {', '.join(refusing)} back: `waltzctl storage describe {refusing[0]}` says how they are"
        elif not owners or waiting == GONE or set(owners) & silent:
            step = "wait until another server owns it, or " + repair
        elif missing and sum(name not in silent for name in views[0].replicas) < needed:
            step = f"bring {' and '.join(missing)} back: {needed} replicas have to answer"
        else:
            step = f"wait; if it lasts, see what {owners[0]} says with `waltzctl events --daemon {owners[0]}`"
        yield Reason(
            key=f"closed {spell_numbers(numbers)}",
            sentence=f"{spell(numbers, 'takes', 'take')} no transactions: {cause}",
            next_step=step,
            partitions=numbers,
            names=tuple(missing),
            stops=True,
        )


def _why(views: Sequence[PartitionView]) -> str:
    """Of partitions that wait for the same."""
    first = views[0]
    if len(views) == 1 or first.owner_says_open:
        return first.waiting
    if first.owner is None:
        return "no server owns them"
    if first.said is None:
        return f"their owner {first.owner} does not say how they are"
    return first.said.waiting or f"{first.owner} is recovering them"


def _lonely(found: Picture) -> Iterator[Reason]:
    """Owners notice late that a storage is silent; whoever looks may know before. Or cannot reach it while they can, so
    this says less than that the partition is closed."""
    grouped: dict[tuple[int, int], list[int]] = {}
    for view in found.partitions:
        members = [name for name, role in view.replicas.items() if role is Role.MEMBER]
        answering = sum(name not in found.silent and name not in view.refusing for name in members)
        if view.is_open and answering < majority(len(members)):
            grouped.setdefault((answering, len(members)), []).append(view.partition)
    for (answering, total), numbers in sorted(grouped.items()):
        yield Reason(
            key=f"lonely {spell_numbers(numbers)}",
            sentence=f"seen from here, {answering} of {total} replicas of {spell(numbers)} answer, and "
            f"{majority(total)} have to flush a transaction: if their owners cannot reach more, nothing is committed",
            next_step="bring the storages back that are named above; `waltzctl health` tries it out",
            partitions=tuple(numbers),
        )


def _short(found: Picture, down: Sequence[str]) -> Iterator[Reason]:
    """Replicas that should count and do not, where the storage itself answers."""
    grouped: dict[tuple[str, str], list[tuple[int, str]]] = {}
    silent = {*found.silent, *down}
    for view in found.partitions:
        if view.said is None or not view.is_open:
            continue
        told = {replica.storage for replica in view.said.replicas}
        for replica in view.said.replicas:
            if not replica.counts and replica.role == Role.MEMBER and replica.storage not in silent:
                grouped.setdefault((replica.storage, replica.state), []).append((view.partition, replica.story))
        for name, role in view.replicas.items():
            if role is Role.MEMBER and name not in told and name not in silent:
                grouped.setdefault((name, "UNKNOWN"), []).append((view.partition, "its owner does not know of it yet"))
    for (storage, state), stories in sorted(grouped.items()):
        numbers = tuple(number for number, _ in stories)
        few = "counts" if len(numbers) == 1 else "count"
        story = stories[0][1]
        about = f"{story} (partition {numbers[0]})" if len(numbers) > 1 and story else story
        state_said = state.lower().replace("_", " ")
        yield Reason(
            key=f"short {storage} {state}",
            sentence=f"{storage}'s replica{'' if len(numbers) == 1 else 's'} of {spell(numbers)} no longer {few}: "
            f"{state_said}{', ' if about else ''}{about}",
            next_step=_WHEN_SHORT.get(state, "look at it with `waltzctl storage describe {0}`").format(storage),
            partitions=numbers,
            names=(storage,),
        )


def _replicas(found: Picture) -> Iterator[Reason]:
    """What storages say of the replicas that they have."""
    for view in found.storages:
        said, name = view.said, view.meta.name
        if said is None:
            continue
        refused = [held for held in said.assigned if held.status is None]
        damaged = [held for held in said.assigned if held.status is not None and not held.status.is_sound]
        offline = [held.partition for held in said.assigned if held.status is not None and not held.status.is_available]
        full = [held.partition for held in said.assigned if held.status is not None and held.status.is_full]
        for held in (*refused, *damaged):
            yield Reason(
                key=f"damaged {name} {held.partition}",
                sentence=f"{name} does not vouch for its replica of {held.story}",
                next_step=f"bring it back from the others: `waltzctl storage recover {name}`",
                partitions=(held.partition,),
                names=(name,),
            )
        if offline:
            numbers = spell_numbers(offline).replace(" ", "")
            yield Reason(
                key=f"offline {name}",
                sentence=f"an operator took {spell(offline)} on {name} offline",
                next_step=f"when the reason is gone: `waltzctl storage availability {name} {numbers} --online`",
                partitions=tuple(offline),
                names=(name,),
            )
        if full:
            yield Reason(
                key=f"full {name}",
                sentence=f"the disk of {name} is full ({said.directory}): {spell(full)} cannot be written there",
                next_step=f"free some space on the file system of {said.directory}; it goes on by itself",
                partitions=tuple(full),
                names=(name,),
            )


def _servers(found: Picture, lost: Lost | None) -> Iterator[Reason]:
    if lost is not None:  # one cause, told once
        return
    apart = [view.meta.name for view in found.servers if view.said is not None and not view.said.is_connected]
    for name in apart:
        yield Reason(
            key=f"apart {name}",
            sentence=f"server {name} has no contact with ZooKeeper: it goes on with what it owns and takes nothing new",
            next_step=f"look at the network between {name} and ZooKeeper",
            names=(name,),
        )


def slow(found: Picture) -> list[ServerView | StorageView]:
    return [view for view in found.nodes if view.error is None and view.call.milliseconds > SLOW_MS]


def _slow(found: Picture) -> Iterator[Reason]:
    for view in slow(found):
        yield Reason(
            key=f"slow {view.meta.name}",
            sentence=f"{view.meta.name} took {view.call.milliseconds:,.0f} ms to say how it is",
            next_step="look at the load, the disk and the network of its machine",
            names=(view.meta.name,),
        )


def _moves(found: Picture) -> Iterator[Reason]:
    grouped: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
    for partition, wanted in sorted(found.moves.items()):
        replicas = found.partitions[partition].replicas if partition < len(found.partitions) else {}
        grouped.setdefault((tuple(sorted(replicas)), tuple(wanted)), []).append(partition)
    for (there, wanted), numbers in grouped.items():
        yield Reason(
            key=f"move {spell_numbers(numbers)}",
            sentence=f"replicas of {spell(numbers)} are on their way: now on {', '.join(there)}, in the end on "
            f"{', '.join(sorted(wanted))}",
            next_step="wait for the command that moves them; if none runs, run it again, and it goes on from here",
            partitions=tuple(numbers),
            names=tuple(sorted({*there, *wanted})),
        )


def _documents(found: Picture) -> Iterator[Reason]:
    for trouble, numbers in found.spoiled.items():
        who = f"; the owners of {spell(numbers)} go on with what is known" if numbers else ""
        yield Reason(key=f"documents {trouble}", sentence=trouble + who, next_step=MEND, partitions=tuple(numbers))
