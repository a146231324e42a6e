"""What a seed decides before anything runs: how the cluster is built, and what goes wrong when. Pure.

Each seed draws which kinds of faults there are at all and how often they come, so that some runs see a little of everything
and others much of one kind. A plan is data: it can be written down, shortened event by event, and run again.

Losses are limited to what the guarantees allow: only one storage, the victim, ever loses what it had acknowledged, by
damage, by an empty disk or by an old copy of its files. Every storage may crash, lose power, be cut off or fail to flush.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

FAULTS = (
    "crash",
    "power",
    "pause",
    "cut",
    "slow",
    "reset",
    "coordinator",
    "disk",
    "damage",
    "forget",
    "aim",
    "drain",
    "clock",
    "members",
    "linger",
    "stall",
    "marks",
    "rewind",
    "spoil",
    "rot",
    "restore",
    "skew",
    "upgrade",
    "groups",
    "suspicion",
    "here",
    "forge",
    "instances",
    "archive",
    "trim",
    "backup",
    "subscribers",
    "halt",
    "pieces",
    "losses",
    "vanish",
    "age",
    "regress",
    "filters",
    "removals",
    "policies",
    "quotas",
    "rescue",
    "singles",
    "lookups",
    "decisions",
    "versions",
    "repeats",
    "jumps",
)
"""All kinds. `forget`: the victim gets an empty disk, or an old copy of its files. `aim`: a daemon dies at a message or at
a disk operation that was counted out before, or leaves with what nobody else has. `clock`: clocks differ and run at
different speeds. `members`: operators add, move and remove replicas and storages. `linger`: what a storage was asked for
goes on when the caller has given up. `stall`: disks that are slower than whoever waits for them has patience. `marks`:
clients ask how far the log goes. `rewind`: the documents of the partitions are put back to what they once were. `spoil`: an
operator deletes some of them, or writes nonsense there. `rot`: bytes of the victim's newest segment change,
while it is down, or while it runs, and then it is verified. `restore`: its directory goes back in place or as a volume.
`skew`: what clocks show as the time of day differs between servers, by seconds or by a day, and jumps; a client passes on
a time that it never saw. `upgrade`: an operator has the cluster go over to format 1 in the middle. `groups`: clients submit
groups of transactions. `suspicion`: servers look out for each other, and replace one that died before its coordinator
session ends; ports refuse for a while though the process lives; leader and owner are killed together. `here`:
storages write small appends in the moment in which they come. `forge`: somebody with the key of a server tries to write
into sessions of others. `instances`: of clients that come in pairs only the newest may live; one is paused, replaced by the
other and woken, while owners change. `archive`: storages upload to a store that fails in each way that it may. `trim`: the
same, and storages keep little of what is archived. `backup`: also what is not sealed yet. `subscribers`: members
of a consumer group work, hang, crash and come back; operators replay, skip and reset; who owns the group log dies. `halt`:
machines stand still with their clocks. `pieces`: a new owner reads the locks of the log in many small pieces. `losses`: one
storage after the other loses its disk, each when all partitions are level again. `vanish`: segments that are archived, and
that storages still have, go from the store. `age`: storages keep a minute of what is archived, and hours pass at once.
`regress`: with documents that go back also those of archives, instances and the assignment, and the counter of client
ids. `filters`: a consumer group wants the transactions with some headers only. `removals`: a group is removed under
work, and made again under its name. `policies`: an operator takes grants to append, and gives them back. `quotas`: an
operator bounds what names may append. `rescue`: all storages but one are lost while all are level, an operator rescues what
is closed, and the others come back, without their disks or as they were. `singles`: servers take a transaction that
arrives alone in the call that brings it; else they take all as columns, as servers do that are older than their clients.
`lookups`: an owner looks up in the log which transaction marked a lock that its table does not know. `decisions`: clients
read the events of a boundary, and append under the condition that nothing in it has changed; in format 1 only. `versions`:
daemons are upgraded to the next minor version and back, one after the other, and the cluster is finalized in between; now
and then one starts that must be refused. `repeats`: the answer of a reset of a consumer group is lost, and it is sent
again. `jumps`: storages keep minutes of what is archived, minutes pass at once, and clocks of servers or of a storage are
wrong."""
BESIDE: dict[str, dict[str, float]] = {
    "later": {"members": 0.4, "linger": 0.4, "stall": 0.4, "marks": 0.4, "rewind": 0.06, "spoil": 0.06},
    "last": {"rot": 0.25, "restore": 0.25},
    "newest": {"skew": 0.4, "upgrade": 0.4, "groups": 0.4},
    "youngest": {"suspicion": 0.5, "here": 0.5},
    "foreign": {"forge": 0.4},
    "latest": {"instances": 0.3},
    "archive": {"archive": 0.3},
    "trim": {"trim": 0.3},
    "backup": {"backup": 0.3},
    "subscribed": {"subscribers": 0.4},
    "halted": {"halt": 0.3},
    "warmed": {"pieces": 0.5},
    "losing": {"losses": 0.2},
    "vanishing": {"vanish": 0.3},
    "aged": {"age": 0.2},
    "regressing": {"regress": 0.05},
    "filtering": {"filters": 0.1},
    "removing": {"removals": 0.1},
    "policing": {"policies": 0.1},
    "bounding": {"quotas": 0.1},
    "rescuing": {"rescue": 0.06},
    "single": {"singles": 0.5},
    "looking": {"lookups": 0.4},
    "deciding": {"decisions": 0.2},
    "mixing": {"versions": 0.15},
    "repeating": {"repeats": 0.2},
    "jumping": {"jumps": 0.15},
}
"""Generators of their own, each with the kinds that it draws and how often: a kind that is added leaves the draws of all
others as they were. Kinds that are in none of them are drawn half of the time by the generator of the plan. `rewind` and
`spoil` are rare: they may leave a partition to an operator, and a run ends there."""
OF_GROUPS = ("subscribers", "filters", "removals")
"""Kinds that need a consumer group with members."""
PAIRS = (("0.0.0", "0.1.0"), ("0.1.0", "0.2.0"), ("0.1.0", "0.2.0"))
"""Versions between which a cluster is upgraded: that before this one, this one, and the next one."""
STRAYS = {"0.1.0": ("0.0.0", "0.3.0")}
"""Versions that do not fit, by the version in which a cluster began. Version 0.0 itself refuses nobody."""
REPLICAS_MIN = 3
"""Operators never ask for fewer: one storage alone may lose what it had acknowledged."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    storages: int
    servers: int
    clients: int
    callers: int
    """Of each client, each with one transaction in flight."""
    partitions: int
    seconds: float
    """How long things go wrong; then everything is mended."""
    rate: float
    """So many transactions are begun each second, by all callers together, while nothing is wrong."""
    segment_bytes: int
    lock_table_size: int
    locks: int
    """How many different ones the clients race for."""
    inflight_bytes: int
    """On the way to the storages, before batches queue."""
    tail_bytes: int
    session_bytes: int
    storage_seconds: float
    session_seconds: float
    """Of the coordinator."""
    keep_alive_seconds: float
    drift: float
    """How much faster or slower a clock may run."""
    faults: tuple[str, ...]
    format: int = 0
    """Of the segments that the cluster writes from its start."""
    feed_bytes: int = 256 << 10
    """Of transactions in one frame to a reader: less than a group has, sometimes."""
    lease_seconds: float = 0.0
    """For so long owners answer confirmed reads without a round."""
    keep_local: str = "all"
    """What storages keep of the archived log."""
    members: int = 0
    """Of a consumer group."""
    mode: str = ""
    """Of that group."""
    spares: int = 0
    """Storages that hold nothing at first, and belong to the cluster only when an operator says so."""
    versions: tuple[str, ...] = ()
    """Version in which all daemons begin, and the next one; empty if there is one version only."""
    never_mended: tuple[str, ...] = ()
    """In the end these stay dead, frozen or cut off, and all others have to go on without them: never more than a
    minority of the storages, and at least one server is well."""


@dataclass(frozen=True, kw_only=True)
class Event:
    at: float
    what: str
    who: str
    other: str = ""
    amount: float = 0.0

    def __str__(self) -> str:
        about = " ".join(part for part in (self.who, self.other, f"{self.amount:g}" if self.amount else "") if part)
        return f"{self.at:.4f} {self.what} {about}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    seed: int
    setup: Setup
    events: tuple[Event, ...]

    def without(self, dropped: Iterable[int]) -> Plan:
        gone = dict.fromkeys(dropped)
        return replace(self, events=tuple(event for number, event in enumerate(self.events) if number not in gone))


def dump(plan: Plan) -> str:
    return json.dumps(asdict(plan), indent=1)


def load(text: str) -> Plan:
    """What is newer than the plan is drawn by its seed."""
    fields = json.loads(text)
    before = {"spares": 0, "keep_local": "all", "format": 0, "feed_bytes": 256 << 10, "lease_seconds": 0.0, "members": 0}
    before |= {"versions": ()}
    setup = asdict(make_plan(fields["seed"]).setup) | before | fields["setup"]
    setup |= {name: tuple(setup.get(name, ())) for name in ("faults", "versions", "never_mended")}
    return Plan(seed=fields["seed"], setup=Setup(**setup), events=tuple(Event(**event) for event in fields["events"]))


OPERATORS = ("operator-1", "operator-2")


def names(what: str, count: int) -> list[str]:
    return [f"{what}-{number + 1}" for number in range(count)]


def make_plan(
    seed: int,
    *,
    storages: int | None = None,
    servers: int | None = None,
    clients: int | None = None,
    faults: tuple[str, ...] | None = None,
    seconds: float | None = None,
) -> Plan:
    """What is not given is drawn."""
    pick = random.Random(f"plan {seed}")
    beside = {kind for kinds in BESIDE.values() for kind in kinds}
    chosen = tuple(fault for fault in FAULTS if fault not in beside and pick.random() < 0.5) or ("crash",)
    picks = {name: random.Random(f"{name} {seed}") for name in BESIDE}
    for name, kinds in BESIDE.items():
        chosen += tuple(kind for kind, share in kinds.items() if picks[name].random() < share)
    chosen = chosen if faults is None else faults
    setup = Setup(
        storages=storages or pick.choice((3, 3, 3, 3, 5)),
        servers=servers or pick.choice((1, 2, 2, 2, 3)),
        clients=clients or pick.choice((2, 3)),
        callers=pick.choice((1, 2, 3)),
        partitions=pick.choice((1, 1, 2)),
        seconds=seconds or pick.choice((5.0, 10.0, 10.0, 20.0)),
        rate=pick.choice((5.0, 15.0, 40.0)),
        segment_bytes=pick.choice((1500, 4000, 20_000)),
        lock_table_size=pick.choice((1, 16, 50_000)),
        locks=pick.choice((3, 12)),
        inflight_bytes=pick.choice((3000, 16 << 20)),
        tail_bytes=pick.choice((2000, 20_000, 1 << 20)),
        session_bytes=pick.choice((20_000, 1 << 30)),
        storage_seconds=pick.choice((1.0, 2.0)),
        session_seconds=pick.choice((1.5, 3.0)),
        keep_alive_seconds=pick.choice((1.5, 6.0)),
        drift=0.2 if "clock" in chosen else 0.0,
        faults=chosen,
        keep_local=_keep_local(chosen, picks["trim"]),
        spares=picks["later"].choice((1, 1, 2, 3)) if "members" in chosen else 0,
        format=0 if "upgrade" in chosen else picks["newest"].choice((0, 1, 1)),
        feed_bytes=picks["newest"].choice((200, 256 << 10)) if "groups" in chosen else 256 << 10,
        members=picks["subscribed"].choice((2, 4, 6)) if {*OF_GROUPS} & {*chosen} else 0,
        mode=picks["subscribed"].choice(("queue", "keyed", "ordered")) if {*OF_GROUPS} & {*chosen} else "",
        versions=picks["mixing"].choice(PAIRS) if "versions" in chosen else (),
        # A lease assumes that no machine stands still with its clock.
        lease_seconds=0.0 if "halt" in chosen else random.Random(f"lease {seed}").choice((0.0, 0.1, 0.25)),
    )
    weather = _Weather(pick, setup)
    drawn = _events(weather, setup)
    for name, kinds in BESIDE.items():
        weather.pick = picks[name]
        drawn += _events_beside(weather, setup, {kind: ONCE[kind] for kind in kinds if kind in ONCE})
    events = tuple(sorted(drawn, key=lambda event: event.at))
    if chosen and not {"losses", "rescue"} & {*chosen} and random.Random(f"core {seed}").random() < 0.25:
        setup = replace(setup, never_mended=_never_mended(random.Random(f"core of {seed}"), weather))
    return Plan(seed=seed, setup=setup, events=events)


def _keep_local(chosen: tuple[str, ...], pick: random.Random) -> str:
    if "jumps" in chosen:
        return "5m"
    if "age" in chosen:
        return "1m"
    return pick.choice(("1KB", "4KB", "20KB")) if "trim" in chosen else "all"


def _never_mended(pick: random.Random, weather: _Weather) -> tuple[str, ...]:
    """The storage that lost what it had acknowledged goes first: it is no copy to rely on."""
    others = [name for name in weather.storages if name != weather.victim]
    minority = (len(weather.storages) - 1) // 2
    if weather.setup.spares:  # any three of them may be all that hold a partition
        minority = 1
    storages = [weather.victim, *pick.sample(others, len(others))][: pick.randrange(1, minority + 1)]
    return (*storages, *pick.sample(weather.servers, pick.randrange(len(weather.servers))))


def _events(weather: _Weather, setup: Setup) -> list[Event]:
    pick = weather.pick
    kinds = [fault for fault in setup.faults if fault in MAKERS]
    weights = [pick.choice((1, 1, 3)) for _ in kinds]
    pace = pick.choice((0.15, 0.5, 1.5))
    at = 0.0
    while kinds and (at := at + pick.expovariate(1 / pace)) < setup.seconds:
        (kind,) = pick.choices(kinds, weights)
        MAKERS[kind](weather, at)
    return sorted(weather.events, key=lambda event: event.at)


def _events_beside(weather: _Weather, setup: Setup, makers: dict[str, Callable[[_Weather], None]]) -> list[Event]:
    """Beside all others, and not in the place of one of them."""
    weather.events = []
    for kind in (fault for fault in setup.faults if fault in makers):
        makers[kind](weather)
    return weather.events


class _Weather:
    """Makes events; each kind of fault comes with its end."""

    def __init__(self, pick: random.Random, setup: Setup) -> None:
        self.pick = pick
        self.setup = setup
        self.events: list[Event] = []
        self.storages = names("storage", setup.storages + setup.spares)
        self.servers = names("server", setup.servers)
        self.clients = names("client", setup.clients)
        self.victim = pick.choice(self.storages)
        self.next_move = 0.0
        """Not before does an operator want replicas elsewhere again."""

    def add(self, at: float, what: str, who: str, *, other: str = "", amount: float = 0.0) -> None:
        self.events.append(Event(at=round(at, 6), what=what, who=who, other=other, amount=round(amount, 6)))

    def span(self) -> float:
        """How long something lasts."""
        return self.pick.choice((0.01, 0.1, 0.5, 1.0, 3.0, 8.0)) * (0.5 + self.pick.random())

    def anybody(self) -> str:
        return self.pick.choice(self.storages + self.servers * 2 + self.clients[:1])

    def daemon(self) -> str:
        return self.pick.choice(self.storages + self.servers)


def _crash(weather: _Weather, at: float) -> None:
    pick = weather.pick
    if pick.random() < 0.15:
        _roll(weather, at)
        return
    who = [weather.anybody()]
    if pick.random() < 0.1:
        who = list(weather.storages)
    for name in who:
        weather.add(at + 0.01 * pick.random() * (len(who) > 1), "kill", name)
        weather.add(at + weather.span(), "start", name)


def _roll(weather: _Weather, at: float) -> None:
    """One storage after the other is away for a while, and each time another session begins without it: who is level at the
    end was not always a member that counts."""
    pick = weather.pick
    step = pick.choice((0.5, 1.5, 4.0))
    for name in pick.sample(weather.storages, len(weather.storages)):
        weather.add(at, "kill", name)
        _new_session(weather, at + 0.4 * step * pick.random())
        weather.add(at + step * (0.4 + 0.4 * pick.random()), "start", name)
        at += step


def _new_session(weather: _Weather, at: float) -> None:
    for name in weather.servers:
        weather.add(at, "kill", name)
        weather.add(at + 0.01, "start", name)


def _power(weather: _Weather, at: float) -> None:
    pick = weather.pick
    who = list(weather.storages) if pick.random() < 0.3 else [pick.choice(weather.storages)]
    for name in who:
        weather.add(at + 0.01 * pick.random() * (len(who) > 1), "power", name, amount=pick.randrange(2))
        weather.add(at + weather.span(), "start", name)


def _pause(weather: _Weather, at: float) -> None:
    name = weather.anybody()
    weather.add(at, "pause", name)
    weather.add(at + weather.span(), "resume", name)


def _cut(weather: _Weather, at: float) -> None:
    pick = weather.pick
    if pick.random() < 0.3:
        _split(weather, at)
        return
    who = weather.daemon()
    everybody = [name for name in (*weather.storages, *weather.servers, *weather.clients, "zookeeper") if name != who]
    others = everybody if pick.random() < 0.4 else pick.sample(everybody, pick.randrange(1, 3))
    ways = pick.choice((("cut", "cut"), ("cut", ""), ("", "cut")))
    until = at + weather.span()
    for other in others:
        for way, (source, target) in zip(ways, ((who, other), (other, who)), strict=True):
            if way:
                weather.add(at, "cut", source, other=target)
                weather.add(until, "mend", source, other=target)


def _split(weather: _Weather, at: float) -> None:
    """Two sides that hear nothing of each other: an owner may be left with too few storages, the others go on."""
    until = at + weather.span()
    sides: tuple[list[str], list[str]] = ([], [])
    for name in (*weather.storages, *weather.servers, *weather.clients, "zookeeper"):
        sides[weather.pick.randrange(2)].append(name)
    for here in sides[0]:
        for there in sides[1]:
            for source, target in ((here, there), (there, here)):
                weather.add(at, "cut", source, other=target)
                weather.add(until, "mend", source, other=target)


def _slow(weather: _Weather, at: float) -> None:
    pick = weather.pick
    what, name = pick.choice((("slow", weather.daemon()), ("slow disk", pick.choice(weather.storages))))
    weather.add(at, what, name, amount=pick.choice((0.02, 0.2, 1.0)))
    weather.add(at + weather.span(), what, name)


def _reset(weather: _Weather, at: float) -> None:
    weather.add(at, "reset", weather.anybody())


def _coordinator(weather: _Weather, at: float) -> None:
    pick = weather.pick
    what = pick.choice(("expire", "expire", "lose answer", "down"))
    if what == "down":
        weather.add(at, "down", "zookeeper")
        weather.add(at + weather.span(), "up", "zookeeper")
    else:
        weather.add(at, what, pick.choice(weather.servers))


def _lost_flush(weather: _Weather, at: float) -> None:
    """Every disk loses a flush, and later its power: what was in the cache only is gone."""
    later = at + weather.span()
    for name in weather.storages:
        weather.add(at, "flush error", name)
        weather.add(later, "power", name)
        weather.add(later + 0.1, "start", name)


def _disk(weather: _Weather, at: float) -> None:
    pick = weather.pick
    if pick.random() < 0.2:
        _lost_flush(weather, at)
        return
    name, what = pick.choice(weather.storages), pick.choice(("flush error", "full"))
    weather.add(at, what, name)
    if what == "full":
        weather.add(at + weather.span(), "room", name)


def _damage(weather: _Weather, at: float) -> None:
    """While it is down: what runs has looked at its files already."""
    weather.add(at, "kill", weather.victim)
    for _ in range(weather.pick.choice((1, 1, 4))):
        weather.add(at + 0.001, "flip", weather.victim, amount=weather.pick.random())
    weather.add(at + 0.002 + weather.span(), "start", weather.victim)


def _forget(weather: _Weather, at: float) -> None:
    pick = weather.pick
    weather.add(at, "photograph", weather.victim)
    later = at + weather.span()
    if pick.random() < 0.5:
        _lag(weather, at + 0.001, later)
    weather.add(later, "kill", weather.victim)
    weather.add(later + 0.001, weather.pick.choice(("wipe", "old copy", "old copy")), weather.victim)
    weather.add(later + 0.002 + weather.span(), "start", weather.victim)


def _lag(weather: _Weather, at: float, later: float) -> None:
    """What the victim loses counts only where another one never had it, and a new session asks."""
    other = weather.pick.choice([name for name in weather.storages if name != weather.victim])
    weather.add(at, "kill", other)
    _new_session(weather, later)
    weather.add(later + 0.002, "start", other)


def _rot(weather: _Weather, at: float) -> None:
    pick, later = weather.pick, at + weather.span()
    if pick.random() < 0.3:
        weather.add(at, "rot", weather.victim, amount=pick.random())
        weather.add(later, "verify", weather.victim)
        return
    if pick.random() < 0.7:
        _lag(weather, at, later)
    weather.add(later, pick.choice(("kill", "kill", "power")), weather.victim, amount=pick.randrange(2))
    weather.add(later + 0.001, "rot", weather.victim, amount=pick.random())
    weather.add(later + 0.003, "start", weather.victim)


def _restore(weather: _Weather, at: float) -> None:
    pick, victim = weather.pick, weather.victim
    if pick.random() < 0.5:
        weather.add(at, "photograph", victim)
        again, end, how = at + 0.1, "stop", "copy in place"
        if pick.random() < 0.6:
            weather.add(at + 0.1, "kill", victim)
            weather.add(at + 0.2, "start", victim)
            again, end = at + 1.0 + pick.random(), "kill"
    else:  # what replicas have acknowledged is written down when a session is young, and every ten seconds
        _new_session(weather, at)
        weather.add(at + pick.choice((0.1, 0.3, 1.0)), "photograph", victim)
        again, end, how = at + 2.5 + pick.choice((0.0, 1.0, 9.0)), "kill", "snapshot"
    later = again + weather.span()
    if pick.random() < 0.8:
        _lag(weather, again, later)
    weather.add(later, end, victim)
    weather.add(later + (0.001 if end == "kill" else 0.1), how, victim)
    weather.add(later + (0.003 if end == "kill" else 0.11), "start", victim)


def _abandon(weather: _Weather, at: float) -> None:
    """One storage alone has what was written last. It is away while the others go on without that, and comes back when
    the session that they had is over, too."""
    pick = weather.pick
    lonely = pick.choice(weather.storages)
    until = at + 0.05 + 0.5 * pick.random()
    for server in weather.servers:
        for other in weather.storages:
            if other != lonely:
                weather.add(at, "cut", server, other=other)
                weather.add(until, "mend", server, other=other)
    weather.add(until - 0.01, "kill", lonely)
    _new_session(weather, until - 0.005)
    later = until + 1.0 + 2 * pick.random()
    _new_session(weather, later)
    weather.add(later + 0.1 * pick.random(), "start", lonely)


def _aim(weather: _Weather, at: float) -> None:
    pick = weather.pick
    if pick.random() < 0.3:
        _abandon(weather, at)
        return
    if pick.random() < 0.5:
        name = weather.daemon()
        weather.add(at, "die at message", name, amount=pick.randrange(1, 60))
    else:
        name = pick.choice(weather.storages)
        weather.add(at, "die at operation", name, amount=pick.randrange(1, 40))
    if pick.random() < 0.5:  # something happens at all, while nothing much is going on
        weather.add(at + 0.001, "expire", pick.choice(weather.servers))
    weather.add(at + weather.span(), "start", name)


def _drain(weather: _Weather, at: float) -> None:
    name = weather.pick.choice(weather.servers + weather.storages[:1])
    weather.add(at, "stop", name)
    weather.add(at + 1.0 + weather.span(), "start", name)


def _members(weather: _Weather, at: float) -> None:
    """An operator wants the replicas of some partitions elsewhere; perhaps the tool dies on the way, and is run again."""
    pick = weather.pick
    if at < weather.next_move:
        return
    weather.next_move = at + pick.choice((0.3, 2.0, 5.0))
    operator = pick.choice(OPERATORS)
    count = pick.choice((REPLICAS_MIN, REPLICAS_MIN, REPLICAS_MIN, REPLICAS_MIN + 1, REPLICAS_MIN + 2))
    goal = pick.sample(weather.storages, min(count, len(weather.storages)))
    everything = range(weather.setup.partitions)
    partitions = everything if pick.random() < 0.5 else [pick.choice(everything)]
    said = f"{','.join(map(str, partitions))}:{','.join(sorted(goal))}"
    weather.add(at, "place", operator, other=said, amount=pick.randrange(2))
    if pick.random() < 0.3:
        later = at + weather.span()
        weather.add(later, "kill", operator)
        weather.add(later + weather.span(), "start", operator)
    if pick.random() < 0.3:  # while it is on its way
        _new_session(weather, at + weather.span())


def _rewind(weather: _Weather, at: float) -> None:
    if weather.pick.random() < 0.5:
        weather.add(at, "remember", "zookeeper")
        at += weather.span()
    weather.add(at, "go back", "zookeeper")


def _spoil(weather: _Weather, at: float) -> None:
    pick = weather.pick
    path = f"{pick.choice(('/partitions', '/replicas'))}/{pick.randrange(weather.setup.partitions)}"
    weather.add(at, pick.choice(("delete document", "spoil document")), "zookeeper", other=path)


def _stall(weather: _Weather, at: float) -> None:
    pick, patience = weather.pick, weather.setup.storage_seconds
    who = list(weather.storages) if pick.random() < 0.1 else [pick.choice(weather.storages)]
    for name in who:
        if pick.random() < 0.5:
            weather.add(at, "hang disk", name, amount=patience * pick.choice((0.5, 1.1, 2.5)))
        else:
            weather.add(at, "slow disk", name, amount=patience * pick.choice((0.7, 1.5, 4.0)))
            weather.add(at + weather.span(), "slow disk", name)


DAY_SECONDS = 86_400.0


def _skew(weather: _Weather) -> None:
    pick = weather.pick
    for name in weather.servers:
        at = 0.0 if pick.random() < 0.6 else pick.random() * weather.setup.seconds
        for _ in range(pick.randrange(3)):
            weather.add(at, "set clock", name, amount=pick.choice((0.5, 25.0, DAY_SECONDS, -0.5, -25.0, -DAY_SECONDS)))
            at += pick.random() * weather.setup.seconds
    if pick.random() < 0.3:
        client = pick.choice(weather.clients)
        weather.add(pick.random() * weather.setup.seconds, "lie", client, amount=DAY_SECONDS)


def _upgrade(weather: _Weather) -> None:
    """Sometimes at once with something else that goes wrong."""
    pick, setup = weather.pick, weather.setup
    at = setup.seconds * pick.random() * 0.8
    weather.add(at, "upgrade", "operator-1")
    if pick.random() < 0.5:
        _new_session(weather, at + pick.choice((0.0, 0.3, 1.0)))


def _suspicion(weather: _Weather) -> None:
    pick = weather.pick
    at = weather.setup.seconds * pick.random() * 0.3
    while at < weather.setup.seconds:
        who = pick.sample(weather.servers, pick.choice((1, 1, 1, len(weather.servers))))
        for name in who:
            begins = at + 0.02 * pick.random() * (len(who) > 1)
            if pick.random() < 0.5:
                weather.add(begins, "kill", name)
                weather.add(begins + pick.choice((0.05, 0.3, 1.0, 5.0)) * (0.5 + pick.random()), "start", name)
            else:
                for _ in range(pick.choice((1, 1, 5))):
                    lasts = pick.choice((0.05, 0.3, 2.0)) * (0.5 + pick.random())
                    weather.add(begins, "refuse", name)
                    weather.add(begins + lasts, "accept", name)
                    begins += 2 * lasts
        at += pick.choice((0.5, 3.0)) * (0.5 + pick.random())


def _forge(weather: _Weather) -> None:
    pick, at = weather.pick, 0.0
    while (at := at + pick.choice((0.1, 0.5, 3.0)) * (0.5 + pick.random())) < weather.setup.seconds:
        weather.add(at, "forge", pick.choice(weather.storages))


def _instances(weather: _Weather) -> None:
    pick = weather.pick
    at = weather.setup.seconds * pick.random() * 0.2
    while at < weather.setup.seconds:
        name, lasts = pick.choice(weather.clients), pick.choice((0.1, 0.5, 1.5, 4.0)) * (0.5 + pick.random())
        weather.add(at, "pause", name)
        weather.add(at + lasts, "resume", name)
        if pick.random() < 0.4:  # the next owner knows only what the coordinator knows
            server = pick.choice(weather.servers)
            begins = at + lasts * pick.random()
            weather.add(begins, "kill", server)
            weather.add(begins + pick.choice((0.01, 0.5, 3.0)), "start", server)
        at += lasts * pick.random() + pick.choice((0.1, 1.0))


def _subscribers(weather: _Weather) -> None:
    """A fifth of the members crash again and again; one hangs; an operator does something; who has the group log dies."""
    pick, seconds = weather.pick, weather.setup.seconds
    members = names("member", weather.setup.members)
    crashing = pick.sample(members, max(1, len(members) // 5))
    at = 0.0
    while (at := at + pick.choice((0.2, 1.0)) * (0.5 + pick.random())) < seconds:
        what = pick.choice(("crash", "crash", "hang", "operate", "owner", "log"))
        if what == "crash":
            name = pick.choice(crashing)
            weather.add(at, "kill", name)
            weather.add(at + pick.choice((0.05, 0.5, 2.0)), "start", name)
        elif what == "hang":
            name = pick.choice(members)
            weather.add(at, "pause", name)
            weather.add(at + pick.choice((0.5, 3.0, 6.0)), "resume", name)
        elif what == "operate":
            verb = pick.choice(("replay", "replay", "discard", "skip", "reset"))
            weather.add(at, verb, "group", other=str(pick.randrange(weather.setup.partitions)), amount=pick.random())
        elif what == "owner":
            name = pick.choice(weather.servers)
            weather.add(at, "kill", name)
            weather.add(at + pick.choice((0.01, 0.5, 2.0)), "start", name)
        else:
            weather.add(at, "kill owner", "group", amount=pick.choice((0.05, 0.5, 3.0)))


def _removals(weather: _Weather) -> None:
    """The owner of the group log dies while a group is removed, sometimes."""
    pick, at = weather.pick, 0.0
    while (at := at + pick.choice((0.5, 2.0)) * (0.5 + pick.random())) < weather.setup.seconds:
        weather.add(at, "remove", "group", amount=pick.choice((0.0, 0.2, 1.0)))
        if pick.random() < 0.3:
            weather.add(at + 0.1 * pick.random(), "kill owner", "group", amount=pick.choice((0.05, 0.5)))


def _repeats(weather: _Weather) -> None:
    """Where there is a consumer group, it is reset more often, too."""
    pick, at = weather.pick, 0.0
    while weather.setup.members and (at := at + pick.choice((0.5, 2.0)) * (0.5 + pick.random())) < weather.setup.seconds:
        weather.add(at, "reset", "group", other=str(pick.randrange(weather.setup.partitions)), amount=pick.random())


def _policies(weather: _Weather) -> None:
    _changing_grants(weather, "grant")


def _quotas(weather: _Weather) -> None:
    _changing_grants(weather, "quota")


def _changing_grants(weather: _Weather, what: str) -> None:
    pick, at = weather.pick, 0.0
    while (at := at + pick.choice((0.2, 1.5)) * (0.5 + pick.random())) < weather.setup.seconds:
        weather.add(at, what, "policy")


def _halt(weather: _Weather) -> None:
    pick, at = weather.pick, 0.0
    while (at := at + pick.choice((0.5, 2.0)) * (0.5 + pick.random())) < weather.setup.seconds:
        name = weather.anybody()
        weather.add(at, "halt", name)
        weather.add(at + weather.span(), "resume", name)


LOSING = ("damage", "forget", "rot", "restore")
"""Kinds by which the victim loses what it had acknowledged, whenever they come."""


def _losses(weather: _Weather) -> None:
    """Beside a victim that may lose something at the same time it would be too much."""
    pick, at = weather.pick, 0.0
    if set(LOSING) & set(weather.setup.faults):
        return
    while (at := at + pick.choice((0.3, 1.5)) * (0.5 + pick.random())) < weather.setup.seconds:
        name = pick.choice(weather.storages)
        weather.add(at, "lose when level", name)
        weather.add(at + weather.span(), "start", name)


def _rescue(weather: _Weather) -> None:
    """The storage that is kept has the only copy: nothing else may take it, and no document may go back before it."""
    pick, at = weather.pick, 0.0
    if {*LOSING, "losses", "rewind", "spoil"} & {*weather.setup.faults}:
        return
    while (at := at + pick.choice((0.5, 2.0)) * (0.5 + pick.random())) < weather.setup.seconds:
        kept = pick.choice(weather.storages)
        weather.add(at, "disaster", kept, amount=pick.choice((0.0, 0.5, 1.0)))
        for name in weather.storages:
            if name != kept:
                weather.add(at + weather.span(), "start", name)


def _vanish(weather: _Weather) -> None:
    """While no owner is about to remove from storages what it has just seen in the store."""
    pick, at = weather.pick, 0.0
    while (at := at + pick.choice((1.0, 3.0)) * (0.5 + pick.random())) < weather.setup.seconds:
        for name in weather.servers:
            weather.add(at, "kill", name)
        weather.add(at + 0.001, "vanish", "store", amount=pick.random())
        for name in weather.servers:
            weather.add(at + 0.002, "start", name)


def _versions(weather: _Weather) -> None:
    """Upgrade in each order, and back; the level is raised in the middle or behind it, and an old storage starts meanwhile.
    Beside that single daemons get a version that does not fit, and all servers start at once with versions that do not fit
    together."""
    pick, setup, seconds = weather.pick, weather.setup, weather.setup.seconds
    older, newer = setup.versions
    at, raises = 0.1 * seconds * pick.random(), list[float]()
    strays = STRAYS.get(older, ())
    if strays and pick.random() < 0.4:  # when the list is empty, so that all servers pass the first look
        back = at + 1.5 * setup.session_seconds
        versions = [older, strays[-1]] * len(weather.servers)
        for name, version in zip(pick.sample(weather.servers, len(weather.servers)), versions, strict=False):
            weather.add(at, "kill", name)
            weather.add(at, "install", name, other=version)
            weather.add(back, "start", name)
        at = back + 1.0
    for goal in pick.choice(((newer,), (newer, older), (newer, older, newer))):
        order = [*weather.storages, *weather.servers]
        order = pick.choice((order, order[::-1], pick.sample(order, len(order))))
        step = seconds * pick.choice((0.02, 0.05)) * (0.5 + pick.random())
        for name in order:
            weather.add(at, pick.choice(("kill", "stop", "stop")), name)
            _install(weather, at, name, goal)
            at += step
        if pick.random() < 0.6:
            raises.append(max(0.0, at + pick.choice((-1.0, 0.5)) * pick.random()))
    for _ in range(pick.choice((0, 2, 4)) if strays else 0):
        at, name = seconds * pick.random(), pick.choice((pick.choice(weather.storages), weather.daemon()))
        weather.add(at, "kill", name)
        _install(weather, at, name, pick.choice((older, *strays)))
    for at in raises:
        hesitates = 0.0
        if pick.random() < 0.5:  # a storage of the older version starts behind the look, and joins before the change
            hesitates, name = 1.0 + pick.random(), pick.choice(weather.storages)
            weather.add(at + 0.4, "kill", name)
            _install(weather, at + 0.4, name, older)
        weather.add(at, "finalize", "operator-1", amount=hesitates)


def _install(weather: _Weather, at: float, name: str, version: str) -> None:
    """The daemon starts again at once or a little later; a supervisor starts one that was told to stop, too."""
    weather.add(at, "install", name, other=version)
    weather.add(at + 0.001 + weather.pick.choice((0.0, 0.0, 0.3)), "start", name)


def _age(weather: _Weather) -> None:
    pick, at, ahead = weather.pick, 0.0, 0.0
    while (at := at + pick.choice((1.0, 3.0)) * (0.5 + pick.random())) < weather.setup.seconds:
        ahead += pick.choice((30.0, 90.0, 3600.0))
        for name in weather.servers:
            weather.add(at, "set clock", name, amount=ahead)


TAKING_AWAY = (
    "crash", "power", "pause", "cut", "slow", "aim", "disk", "damage", "forget", "drain", "stall", "halt", "members",
    "rot", "restore", "losses", "rescue", "versions", "reset", "rewind", "spoil", "suspicion",
)  # fmt: skip
"""Kinds by which a storage may be silent, or may be another one."""


def _jumps(weather: _Weather) -> None:
    """Time passes at once for all, with segments that the policy keeps at first, and not later. Beside that the clock of
    one storage is wrong, the same one all the time, or those of any servers; or both, where all storages answer."""
    pick, setup = weather.pick, weather.setup
    wrong = pick.choice((weather.servers, [pick.choice(weather.storages)]))
    if not {*TAKING_AWAY} & {*setup.faults}:  # else two of three clocks that are known may be wrong
        wrong = [*weather.servers, pick.choice(weather.storages)]
    elif {"skew", "age"} & {*setup.faults}:
        wrong = weather.servers
    at = 0.0
    while (at := at + pick.choice((0.3, 1.5)) * (0.5 + pick.random())) < setup.seconds:
        if pick.random() < 0.4 and "backup" not in setup.faults:  # the moment of a backup is compared with virtual time
            weather.add(at, "pass time", "everybody", amount=pick.choice((30.0, 120.0, 120.0, 400.0)))
        else:
            ahead = pick.choice((0.0, 25.0, 3600.0, DAY_SECONDS, -25.0, -3600.0, -DAY_SECONDS))
            weather.add(at, "set clock", pick.choice(wrong), amount=ahead)


ONCE: dict[str, Callable[[_Weather], None]] = {
    "halt": _halt,
    "losses": _losses,
    "rescue": _rescue,
    "vanish": _vanish,
    "age": _age,
    "versions": _versions,
    "skew": _skew,
    "upgrade": _upgrade,
    "suspicion": _suspicion,
    "forge": _forge,
    "instances": _instances,
    "subscribers": _subscribers,
    "removals": _removals,
    "repeats": _repeats,
    "jumps": _jumps,
    "policies": _policies,
    "quotas": _quotas,
}
"""Kinds that make all their events of a run at once."""
MAKERS: dict[str, Callable[[_Weather, float], None]] = {
    "crash": _crash,
    "power": _power,
    "pause": _pause,
    "cut": _cut,
    "slow": _slow,
    "reset": _reset,
    "coordinator": _coordinator,
    "disk": _disk,
    "damage": _damage,
    "forget": _forget,
    "aim": _aim,
    "drain": _drain,
    "members": _members,
    "stall": _stall,
    "rewind": _rewind,
    "spoil": _spoil,
    "rot": _rot,
    "restore": _restore,
}
_WITHOUT_EVENTS = (
    "clock",
    "linger",
    "marks",
    "groups",
    "here",
    "archive",
    "trim",
    "backup",
    "pieces",
    "lookups",
    "regress",
    "filters",
    "singles",
    "decisions",
)
assert {*MAKERS, *ONCE, *_WITHOUT_EVENTS} == set(FAULTS)
