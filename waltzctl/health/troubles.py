"""Rules about what is wrong with a cluster now: one reason for each cause, however many partitions it affects. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from waltzctl.health.facts import REPAIR, Facts, Found, Grade, Reason, unsure, warn
from waltzctl.shell.blueprint import ZOOKEEPER
from waltzctl.shell.numbers import format_partitions
from waltzctl.shell.safety import margin
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, PartitionView, ServerView, StorageView
from waltzd.cluster.assignment import format_numbers
from waltzd.cluster.documents import Membership
from waltzd.errors import CannotConnect, ForeignCluster, TlsMismatch, WaltzError
from waltzd.errors.operations import BadMetadata, CoordinatorRefused, NodeMissing
from waltzd.protocol.descriptions import DIVERGED
from waltzd.protocol.quorum import majority

SLOW_MS = 1000.0
"""Milliseconds; a daemon that takes longer to answer is reported as slow."""
GONE = "the owner is gone"
_WHEN_SHORT = dict.fromkeys(
    ("CONNECTING", "SETTLING", "CATCHING_UP", "SLOW", "DAMAGED", "UNKNOWN"), "wait until it is level"
) | {
    "GIVEN_UP": "bring it back from the others: `waltzctl storage recover {0}`",
    DIVERGED: "find out who wrote there, with `waltzctl partition compare` and the logs of {0}; then set it aside and have "
    "it copied anew: `waltzctl storage recover {0}`",
}
"""State of a replica, as its owner sees it → next step for the operator; "{0}" is the storage."""


# -- processes, and who leads them -------------------------------------------------------------------------------------


def coordination(facts: Facts) -> Found:
    found, lost = facts.snapshot, facts.lost
    if lost is not None:
        seen = f"; its last answer to this machine was at {lost.seen}" if lost.seen else ""
        if isinstance(lost.cause, NodeMissing | BadMetadata):
            yield Reason(
                key="documents",
                sentence=f"ZooKeeper answers, and documents of this cluster are not there or cannot be read: "
                f"{lost.cause.message}{seen}. What owners and storages say is shown; owners go on with the sessions that "
                "they have, and nothing can change hands",
                next_step="restart no server; put the newest copy of ZooKeeper's data back. Make no second cluster over "
                "this one: its storages hold what was committed",
            )
            return ""
        if isinstance(lost.cause, CoordinatorRefused):
            yield Reason(
                key="coordinator",
                sentence=f"ZooKeeper refuses to show the documents: {lost.cause.message}{seen}. What owners and storages "
                "say is shown",
                next_step=lost.cause.detail_next_step,
            )
            return ""
        yield Reason(
            key="coordinator",
            sentence=f"ZooKeeper does not answer: {lost.cause.message}{seen}. What owners and storages say is shown; "
            "owners go on, and nothing can change hands",
            next_step=facts.repair if ZOOKEEPER in facts.down else "bring ZooKeeper back",
        )
    elif found.servers and found.leader is None:
        yield Reason(
            key="leader",
            grade=Grade.WARN,
            sentence="no server is the leader, so no partition is assigned to a server",
            next_step="wait for one ZooKeeper session timeout; if it persists, see `waltzctl events --level warning`",
        )
    if len(found.partitions) != len(found.logs):
        yield Reason(
            key="assignment",
            sentence=f"the assignment names {len(found.partitions)} of {found.meta.partitions} partitions: that document "
            "was changed by hand, and the others have no owner",
            next_step="put the document `assignment` back as it was; `waltzctl history` says who did what lately",
            stops=True,
        )
    for name, server in (
        found.server_reports.items() if lost is None else ()
    ):  # not if ZooKeeper is lost, which explains this
        if not server.is_connected:
            yield Reason(
                key=f"apart {name}",
                sentence=f"server {name} has no contact with ZooKeeper: it goes on with what it owns and takes nothing new",
                next_step=f"look at the network between {name} and ZooKeeper",
                names=(name,),
            )
    return f"{found.leader} leads, and every server has contact with ZooKeeper"


def processes(facts: Facts) -> Found:
    found = facts.snapshot
    if not found.servers and facts.lost is None:
        yield Reason(
            key="servers",
            sentence="no server is registered in ZooKeeper, so none is known to be up",
            next_step=_server_step(found.partitions),
        )
    # `coordination` reports ZooKeeper itself.
    down = [name for name in facts.down if facts.lost is None or name != ZOOKEEPER]
    for view in found.nodes:
        if view.error is not None:
            yield _silence(view, view.error, facts, is_down=view.meta.name in down)
    there = {view.meta.name for view in found.nodes}
    for name in down:
        if name not in there:
            yield Reason(key=f"silent {name}", sentence=f"{name} does not run", next_step=facts.repair, names=(name,))
    for meta in found.missing:
        if meta.name not in facts.down and meta.name not in facts.unlisted:
            yield Reason(
                key=f"missing {meta.name}",
                sentence=f"server {meta.name} is not up: it was at {meta.admin_listen}, and is not registered",
                next_step=f"{facts.repair}; if it is not to come back: `waltzctl server remove {meta.name}`",
                names=(meta.name,),
            )
    # A server that is frozen or cut off for longer than its session lasts is removed from the list.
    for name, pid in sorted(facts.unlisted.items()):
        yield Reason(
            key=f"unlisted {name}",
            sentence=f"server {name} runs (process {pid}), and ZooKeeper does not have it: it is frozen, has lost "
            "contact, or has only just been started",
            next_step=f"wait a moment; end a frozen process with `kill -9 {pid}`, and start it again with `{facts.repair}`",
            names=(name,),
        )
    for view in slow(found):
        yield Reason(
            is_note=True,
            grade=Grade.WARN,
            sentence=f"{view.meta.name} took {view.call.milliseconds:,.0f} ms to report its state",
            next_step="check the load, the disk and the network of its machine",
            names=(view.meta.name,),
        )
    return f"all {len(found.nodes)} answer"


def _server_step(views: Iterable[PartitionView]) -> str:
    """Return what to do where no server is registered. A server that runs registers again by itself after ZooKeeper has
    ended its session, or lost all sessions."""
    owners = sorted({view.owner for view in views if view.owner is not None})
    if not owners:
        return "start a server; where one runs, its log says why it has no contact with ZooKeeper"
    return (
        f"wait for one ZooKeeper session timeout: {', '.join(owners)} owned partitions, and a server that runs registers "
        "again by itself after ZooKeeper has ended its session; if none comes back, start a server, or see in its log why "
        "it has no contact with ZooKeeper"
    )


def _silence(view: ServerView | StorageView, error: WaltzError, facts: Facts, *, is_down: bool) -> Reason:
    kind, name = "server" if isinstance(view, ServerView) else "storage", view.meta.name
    touched = tuple(one.partition for one in facts.snapshot.partitions if name in one.replicas or name == one.owner)
    step = error.detail_next_step
    if is_down:
        cause, step = f"{kind} {name} does not run", facts.repair
    elif isinstance(error, ForeignCluster):
        cause = f"{kind} {name} is not of this cluster: {error.message}"
        step = f"correct the address of {name}, or start the right process there"
    elif isinstance(error, CannotConnect):
        seconds = error.facts.get("seconds")
        why = f": {error.message}" if seconds is None else f" within {seconds} seconds"
        cause = f"{kind} {name} does not answer at {view.meta.admin_listen}{why}"
        if not isinstance(error, TlsMismatch):
            its_log = f"its process runs: read its log with `waltzctl logs --daemon {name}`"
            step = facts.repair if facts.repair == REPAIR else its_log
    else:
        cause = f"{kind} {name} refuses to report its state: {error.code} {error.message}"
    if touched and kind == "storage":
        cause += f". It has a replica of {format_partitions(touched)}"
    return Reason(key=f"silent {name}", sentence=cause, next_step=step, partitions=touched, names=(name,))


def slow(found: ClusterSnapshot) -> list[ServerView | StorageView]:
    return [view for view in found.nodes if view.error is None and view.call.milliseconds > SLOW_MS]


# -- partitions: which take transactions, and how many replicas of each may fail ---------------------------------------


def margins(facts: Facts) -> Found:
    """Find partitions with too few replicas. An owner notices a silent storage late, so this tool may see it first; or
    only this tool cannot reach the storage. Such a partition may be open, and is not reported as closed."""
    yield from _closed(facts)
    answering = facts.snapshot.storage_reports.keys()
    lonely: dict[tuple[int, int], list[int]] = {}
    below, thin, single, unknown = [], [], [], []
    for view in facts.snapshot.partitions:
        if not view.is_open:
            continue
        counted = margin(view.partition, view.replicas, view.counted)
        held = margin(view.partition, view.replicas, view.counted & answering)
        if not held.members:
            unknown.append(view.partition)
        elif counted.spare < 0:
            below.append(view.partition)
        elif held.spare < 0:
            lonely.setdefault((held.level, held.members), []).append(view.partition)
        elif held.members == 1:
            single.append(view.partition)
        elif held.spare < held.members - majority(held.members):
            thin.append(view.partition)
    for (level, total), numbers in sorted(lonely.items()):
        yield Reason(
            key=f"lonely {format_numbers(numbers)}",
            grade=Grade.UNKNOWN,
            sentence=f"seen from here, {level} of {total} replicas of {format_partitions(numbers)} are level and answer, "
            f"and {majority(total)} have to flush a transaction: if their owners cannot reach more, nothing is committed",
            next_step="bring back the storages named above; test it with `waltzctl health`",
            partitions=tuple(numbers),
        )
    yield from _short(facts)
    if unknown:
        yield unsure(f"the replicas of {format_partitions(unknown)} are not known")
    if below:
        yield Reason(
            sentence=f"fewer replicas of {format_partitions(below)} count than a majority, so nothing is committed"
        )
    if thin:
        yield warn(f"{format_partitions(thin)} can lose fewer replicas than they should")
    if single:
        yield warn(f"{format_partitions(single, 'has', 'have')} one replica only: a lost disk is lost data")
    return "every partition can lose as many replicas as planned"


def _closed(facts: Facts) -> Iterator[Reason]:
    found = facts.snapshot
    grouped: dict[str, list[PartitionView]] = {}
    up = {view.meta.name for view in found.servers}
    for view in found.closed:
        is_gone = view.owner is not None and view.owner not in up
        grouped.setdefault(GONE if is_gone else view.waiting, []).append(view)
    silent = facts.silent
    for waiting, views in grouped.items():
        numbers = tuple(view.partition for view in views)
        owners = sorted({view.owner for view in views if view.owner is not None})
        missing = sorted({name for view in views for name in view.replicas if name in silent})
        replicas = next((view.replicas for view in views if view.replicas), {})
        needed = majority(len(replicas)) if replicas else 0  # without documents only an owner knows the replicas
        cause = f"{GONE} ({', '.join(owners)}), and no other server has taken over" if waiting == GONE else _why(views)
        refusing = sorted(views[0].refusing)
        if not found.servers:
            step = _server_step(views)
        elif refusing and views[0].owner_says_open:
            step = f"bring those on {', '.join(refusing)} back: `waltzctl storage describe {refusing[0]}` says how they are"
        elif not owners or waiting == GONE or set(owners) & silent:
            step = "wait until another server owns it, or " + facts.repair
        elif missing and sum(name not in silent for name in replicas) < needed:
            step = f"bring {' and '.join(missing)} back: {needed} replicas have to answer"
        else:
            step = f"wait; if it lasts, see what {owners[0]} says with `waltzctl events --daemon {owners[0]}`"
        is_unknown = all(view.reported is None and view.owner is not None for view in views)
        yield Reason(
            key=f"closed {format_numbers(numbers)}",
            grade=Grade.UNKNOWN if is_unknown else Grade.FAIL,
            sentence=f"{format_partitions(numbers, 'takes', 'take')} no transactions: {cause}",
            next_step=step,
            partitions=numbers,
            names=tuple(missing),
            stops=True,
        )


def _why(views: Sequence[PartitionView]) -> str:
    """Return the common reason for which these partitions wait."""
    first = views[0]
    if len(views) == 1 or first.owner_says_open:
        return first.waiting
    if first.owner is None:
        return "no server owns them"
    if first.reported is None:
        return f"their owner {first.owner} does not report their state"
    return first.reported.waiting or f"{first.owner} is recovering them"


def _short(facts: Facts) -> Iterator[Reason]:
    """Find replicas that should count and do not, although their storage answers."""
    grouped: dict[tuple[str, str], list[tuple[int, str]]] = {}
    silent = facts.silent
    for view in facts.snapshot.partitions:
        if view.reported is None or not view.is_open:
            continue
        shown = {replica.storage for replica in view.reported.replicas}
        for replica in view.reported.replicas:
            is_short = not replica.counts and replica.role == Membership.MEMBER
            if (is_short or replica.state == DIVERGED) and replica.storage not in silent:
                grouped.setdefault((replica.storage, replica.state), []).append((view.partition, replica.story))
        for name, role in view.replicas.items():
            if role is Membership.MEMBER and name not in shown and name not in silent:
                grouped.setdefault((name, "UNKNOWN"), []).append((view.partition, "its owner does not know of it yet"))
    for (storage, state), stories in sorted(grouped.items()):
        numbers = tuple(number for number, _ in stories)
        few = "counts" if len(numbers) == 1 else "count"
        story = stories[0][1]
        about = f"{story} (partition {numbers[0]})" if len(numbers) > 1 and story else story
        state_words = state.lower().replace("_", " ")
        yield Reason(
            key=f"short {storage} {state}",
            grade=Grade.FAIL if state == DIVERGED else Grade.WARN,
            sentence=f"{storage}'s replica{'' if len(numbers) == 1 else 's'} of {format_partitions(numbers)} "
            f"no longer {few}: "
            f"{state_words}{', ' if about else ''}{about}",
            next_step=_WHEN_SHORT.get(state, "look at it with `waltzctl storage describe {0}`").format(storage),
            partitions=numbers,
            names=(storage,),
        )


# -- what storages and the coordinator hold ----------------------------------------------------------------------------


def replicas(facts: Facts) -> Found:
    for name, storage in facts.snapshot.storage_reports.items():
        for held in storage.assigned:
            if held.status is None or not held.status.is_sound:
                yield Reason(
                    key=f"damaged {name} {held.partition}",
                    sentence=f"{name} does not serve its damaged replica of {held.story}",
                    next_step=f"bring it back from the others: `waltzctl storage recover {name}`",
                    partitions=(held.partition,),
                    names=(name,),
                )
        offline = [held.partition for held in storage.assigned if held.status is not None and not held.status.is_available]
        if offline:
            numbers = format_numbers(offline).replace(" ", "")
            yield Reason(
                key=f"offline {name}",
                grade=Grade.WARN,
                sentence=f"an operator took {format_partitions(offline)} on {name} offline",
                next_step=f"when the reason is gone: `waltzctl storage availability {name} {numbers} --online`",
                partitions=tuple(offline),
                names=(name,),
            )
    return "no replica reports damage"


def moves(facts: Facts) -> Found:
    found = facts.snapshot
    grouped: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
    for partition, wanted in sorted(found.moves.items()):
        replicas = found.partitions[partition].replicas if partition < len(found.partitions) else {}
        grouped.setdefault((tuple(sorted(replicas)), tuple(wanted)), []).append(partition)
    for (there, wanted), numbers in grouped.items():
        yield Reason(
            key=f"move {format_numbers(numbers)}",
            grade=Grade.WARN,
            sentence=f"replicas of {format_partitions(numbers)} are being moved from {', '.join(there)} to "
            f"{', '.join(sorted(wanted))}",
            partitions=tuple(numbers),
            names=tuple(sorted({*there, *wanted})),
        )
    return "none"


def documents(facts: Facts) -> Found:
    for trouble, numbers in facts.snapshot.spoiled.items():
        who = f"; the owners of {format_partitions(numbers)} continue with the last version they read" if numbers else ""
        yield Reason(key=f"documents {trouble}", sentence=trouble + who, partitions=tuple(numbers))
    return "every document in ZooKeeper can be read"


# -- consumer groups ----------------------------------------------------------------------------------------------------


def consumer_groups(facts: Facts) -> Found:
    """Find consumer groups that are stuck or have parked transactions. They do not make the cluster DEGRADED, because
    the cause is usually an application."""
    found = facts.snapshot.groups
    for name, server in facts.snapshot.server_reports.items():
        if server.groups is not None and server.groups.trouble:
            yield Reason(
                sentence=f"{name} may lack the newest state of consumer groups: {server.groups.trouble}",
                next_step="groups deliver nothing new there until this ends: see the group log in `waltzctl partition "
                "list`, and `waltzctl events --level warning`",
            )
    if found is None:
        return "there are none"
    if found.foreign:
        yield warn(
            f"{found.foreign:,} entries of the group log were written by no server, and are skipped: `audit.log` of "
            "the servers names who mounted it"
        )
    for one in found.troubles:
        where = f"the group {one.name} in partition {one.partition}"
        if one.stopped:
            yield warn(f"{where} has stopped: {one.stopped}; {one.lag:,} transactions are not done")
        elif one.paused:
            yield warn(f"{where} is paused: {one.paused}")
        elif one.is_unattended:
            yield warn(f"{where} has {one.lag:,} transactions that are not done, and no member")
        if one.parked:
            yield warn(f"{where} has parked {one.parked:,} transactions")
    shown = sum(bool(one.stopped or one.paused or one.is_unattended) for one in found.troubles)
    left = found.stopped + found.paused + found.unattended - shown
    if left > 0:
        yield warn(f"and at least {left:,} more are stuck: `waltzctl group list` shows all")
    return f"all {found.groups:,} advance" if found.groups else "there are none"
