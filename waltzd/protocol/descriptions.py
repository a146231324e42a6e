"""What daemons say of themselves: the same values in the daemon and in its caller. Pure.

Of any process its clock, its files and the lines that it logged last; of a storage its replicas; of a server the partitions
that it owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import UUID

from waltzd.errors import ObjectAbsent, WaltzError
from waltzd.format.batch import End
from waltzd.format.finding import Finding
from waltzd.protocol.groups import GroupTotals
from waltzd.protocol.histogram import Histogram
from waltzd.protocol.timelines import FIRST, Timeline


@dataclass(frozen=True, kw_only=True)
class Vitals:
    time_ms: int
    """What its clock shows, in milliseconds since 1970: nothing is decided by it."""
    open_files: int | None
    """Files, sockets and directories; None where the system does not tell."""
    open_files_max: int
    """Above this it can neither open a segment nor accept a connection."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A line of its log. A log never has payloads."""

    number: int
    """Rises by one with each line of this process."""
    time_ms: int
    level: str
    """debug, info, warning, error, critical"""
    text: str
    code: str | None
    """Of the error that it tells of."""


@dataclass(frozen=True, kw_only=True)
class Events:
    began_ms: int
    """When the process began to keep them: another one means another process, whose numbers are others."""
    events: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """Where a replica stands: what it votes with, and why it does not."""

    partition: int
    incarnation: UUID
    promised_session: int
    session: int
    """The session whose low-water mark was set last."""
    low_mark: int
    local_low_mark: int
    committed: int
    """The highest id held here that the owner said is committed."""
    last_id: int
    is_available: bool
    is_full: bool
    segments: int
    findings: tuple[Finding, ...]
    damaged_segments: tuple[int, ...] = ()
    """The first ids of the segment files that would heal it, in the order in which they can be installed."""
    contact: int = 0
    """Which opening of the replica this is. A call that changes it names that one, and is refused after the next."""
    end: End | None = None
    """Where its last batch ends. None: its last segment is of format 0, or not readable."""
    tail: str = ""
    """A hash of its last records of format 0, in an answer to its owner; empty where they are in batches, or unknown."""
    archives: bool = False
    """It can be asked to upload sealed segments."""
    floor: int = 0
    """The first id that it has; 0: all. What is below is only in the archive."""
    timelines: tuple[Timeline, ...] = ()
    """Timelines of its log behind the first one, as it remembers them; what it holds is the log of the last one."""
    untrimmed: str = ""
    """Why it keeps what is below the floor that its owner named last; empty where it keeps nothing of it."""
    time: int = 0
    """Microseconds since 1970 by the clock of the storage, when it was opened; 0 where it does not say."""

    @property
    def timeline(self) -> UUID:
        """Identity of the timeline whose log it holds."""
        return self.timelines[-1].identity if self.timelines else FIRST

    @property
    def is_sound(self) -> bool:
        """A replica that is not does not vouch for what it holds."""
        return not self.findings

    @property
    def certain(self) -> int:
        """Up to here it never cuts anything."""
        known = max(self.low_mark, self.committed)
        return min(known, self.last_id) if self.is_sound else known

    def sentence(self) -> str:
        start = f"partition {self.partition}: "
        if self.findings:
            return f"{start}damaged, {self.findings[0].sentence()}"
        if not self.is_available:
            return f"{start}taken offline by an operator"
        full = "; writes wait for disk space" if self.is_full else ""
        return f"{start}holds ids up to {self.last_id}, session {self.promised_session}{full}"


@dataclass(frozen=True, kw_only=True)
class PartitionDescription:
    """One partition of a storage. Without a status it is refused, and `refused` says why."""

    partition: int
    status: ReplicaStatus | None
    refused: WaltzError | None
    story: str
    queued_bytes: int
    disk_bytes: int


@dataclass(kw_only=True)
class Statistics:
    """What a storage has done since it started."""

    appended_records: int = 0
    appended_bytes: int = 0
    groups: int = 0
    group_microseconds: int = 0
    group_microseconds_max: int = 0
    checkpoints: int = 0
    read_records: int = 0
    read_bytes: int = 0
    refused_calls: int = 0
    flush: Histogram = field(default_factory=Histogram)
    """One entry for each group: writing and flushing it."""

    def plus(self, other: Statistics) -> Statistics:
        return Statistics(
            appended_records=self.appended_records + other.appended_records,
            appended_bytes=self.appended_bytes + other.appended_bytes,
            groups=self.groups + other.groups,
            group_microseconds=self.group_microseconds + other.group_microseconds,
            group_microseconds_max=max(self.group_microseconds_max, other.group_microseconds_max),
            checkpoints=self.checkpoints + other.checkpoints,
            read_records=self.read_records + other.read_records,
            read_bytes=self.read_bytes + other.read_bytes,
            refused_calls=self.refused_calls + other.refused_calls,
            flush=self.flush.plus(other.flush),
        )


@dataclass(frozen=True)
class SetAside:
    """The directory of a partition that was taken off its storage."""

    name: str
    bytes: int
    kept_ms: int = 0
    """For so long at least it has been there: a storage that was started again counts from its start."""


@dataclass(frozen=True, kw_only=True)
class ScrubStatus:
    """How a storage looks for rot in its sealed segments."""

    period_seconds: int
    """Seconds in which all sealed segments are read once; 0: the scrub is off."""
    bytes_per_second: int
    """Rate that follows from the period and the size of the sealed segments."""
    done_bytes: int
    """Bytes of sealed segments that the current round has read."""
    total_bytes: int
    """Bytes of all sealed segments."""
    age_ms: int | None = None
    """Milliseconds since the start of the last complete round; None before one is complete."""
    damaged_segments: int = 0
    """Segments in which something was wrong, since the storage started."""
    last_finding: str = ""
    """What was wrong with the last one of them."""


@dataclass(frozen=True, kw_only=True)
class StorageDescription:
    cluster_key: UUID
    partitions: int
    """How many the cluster has."""
    directory: str
    version: str
    free_bytes: int
    uptime_ms: int
    is_draining: bool
    assigned: tuple[PartitionDescription, ...]
    statistics: Statistics
    vitals: Vitals | None = None
    """None where there is no process, as in a simulation."""
    instance: UUID | None = None
    """The process that speaks. The same."""
    free_bytes_min: int = 0
    """With less than this free it takes nothing. 0 from one that does not say."""
    name: str = ""
    """What its directory remembers; empty until it was told."""
    set_aside: tuple[SetAside, ...] = ()
    formats: tuple[int, ...] = (0,)
    """Of the segments that it can write."""
    keeps_group_log: bool = False
    """Whether it can hold a replica of the group log. An older version cannot."""
    scrub: ScrubStatus | None = None
    """None from a storage of an older version."""

    def is_same_as(self, other: StorageDescription) -> bool:
        """One storage under two addresses, which can be spelled in many ways: one process, or the same files."""
        return (self.instance is not None and self.instance == other.instance) or bool(
            self._incarnations & other._incarnations
        )

    @property
    def _incarnations(self) -> set[UUID]:
        """Of its replicas; each is that of its files alone."""
        return {one.status.incarnation for one in self.assigned if one.status is not None}


@dataclass(frozen=True, kw_only=True)
class VerifySummary:
    """What was looked at in one partition."""

    partition: int
    segments: int
    records: int
    bytes: int
    findings: int


DIVERGED = "DIVERGED"
"""The state of a replica that holds another history than the log: it counts for nothing until another takes its place."""


@dataclass(frozen=True, kw_only=True)
class OwnedReplica:
    """One replica of an owned partition, as its owner sees it."""

    storage: str
    role: str
    state: str
    """CONNECTING, SETTLING, LIVE, SLOW, CATCHING_UP, DAMAGED, GIVEN_UP, DIVERGED, DOWN"""
    durable_id: int
    counts: bool
    """Its acknowledgements make transactions committed."""
    story: str


@dataclass(frozen=True, kw_only=True)
class PartitionStatistics:
    """What became of the transactions of a partition since this process owns it. All of it only rises; it begins again with
    every hand-over."""

    attempts: int = 0
    """Transactions that clients wanted to append: committed, refused, and those that have no outcome yet or never got one
    from this process."""
    committed: int = 0
    committed_bytes: int = 0
    """Of their records, with the 40 bytes around each payload."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """By the name of the `Reason`."""
    fed: int = 0
    """Transactions that were sent to mounts, once for each."""
    fed_bytes: int = 0
    commit: Histogram = field(default_factory=Histogram)
    """One entry for each committed transaction: from the arrival of its batch to its outcome."""


@dataclass(frozen=True, kw_only=True)
class Archived:
    """How far the archive of a partition reaches: the newest manifest that is known of. Before the first one, nothing."""

    archive: UUID | None = None
    """Which archive: its label says the same."""
    number: int = 0
    """Of the manifest."""
    sha256: str = ""
    """Of the manifest, which proves everything that it names."""
    last_id: int = -1
    """All ids up to this one are in the archive."""
    timeline: UUID = FIRST
    """Identity of the timeline whose log the manifest names."""


@dataclass(frozen=True, kw_only=True)
class RestoreOrder:
    """One replica that a storage is to make out of an archive, and how far its log shall go."""

    store: str
    """As a storage names it in its configuration."""
    archive: UUID
    cluster: UUID
    """Whose log it is: the key that its segments have in the store."""
    partition: int
    number: int
    """Of a manifest; a newer one may be there."""
    sha256: str
    """Of that manifest."""
    mark: int
    session: int
    """The replica stands as at its end."""
    timelines: tuple[Timeline, ...] = ()
    """Timelines of the restored log behind the first one."""
    source: UUID = FIRST
    """Identity of the timeline whose manifest it is."""
    completes: bool = False
    """A replica is there and has promised itself to `session`: it takes what the archive of its storage proves behind what
    it is certain of. `timelines` are its own; of the archive nothing is named."""
    looks: bool = False
    """With `completes`: take nothing, and answer up to which id the archive proves the log."""


@dataclass(frozen=True, kw_only=True)
class Restoring:
    """How far a storage has come with a replica."""

    bytes: int
    """Of the store, dealt with."""
    bytes_total: int
    kept: int = 0
    """Segments that an earlier attempt had left."""
    status: ReplicaStatus | None = None
    """Where it stands, once it is there."""
    proven_to: int | None = None
    """Up to which id the archive proves the log, where that was asked for."""


@dataclass(frozen=True, kw_only=True)
class BackedUp:
    """How far a partition is backed up: archive and tail together."""

    last_id: int = -1
    moment: int = 0
    """All that was committed at this time is in the store: microseconds since 1970, by an owner's clock. 0: it is not
    known."""
    archives_first: bool = False
    """Nothing was uploaded: a sealed segment waits for the archive."""


@dataclass(frozen=True, kw_only=True)
class MetadataBackup:
    """The documents of the cluster in the archive, as the leader knows it."""

    number: int = 0
    """Of the newest object; 0 before there is one."""
    age_ms: int = -1
    """Since they were last seen to be there as they are; -1: never by this server."""
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class ArchiveCheck:
    """Whether the store still has what is archived: all objects are looked for, again and again."""

    last_id: int = -1
    """All objects of the ids up to this one were there."""
    missing: str = ""
    """Why the next one does not count: it is gone, or is not what it was. Empty where nothing is wrong."""
    age_ms: int | None = None
    """Since it was begun to look for all of them; only an owner says it. None before all were there once."""


@dataclass(frozen=True, kw_only=True)
class OwnedPartition:
    partition: int
    generation: int
    session: int
    step: str
    """VOTING, RECORDING, SETTLING, ADMITTING, OPEN, CLOSED"""
    waiting: str
    """What it waits for, in one sentence; empty when it waits for nothing."""
    committed: int
    last_id: int
    low_mark: int
    mounts: int
    tail_bytes: int
    replicas: tuple[OwnedReplica, ...]
    statistics: PartitionStatistics = field(default_factory=PartitionStatistics)
    format: int = 0
    """Of the segments that the session writes."""
    trouble: str = ""
    """Documents of the coordinator that are gone or spoiled: it goes on with what they said."""
    archived: Archived | None = None
    """None where none of its storages archives, and none ever did."""
    archive_trouble: str = ""
    """Why its archive does not go on."""
    backed_up: BackedUp | None = None
    """None where nothing was backed up in this session."""
    backup_lag_ms: int = 0
    """For how long something that is committed is not backed up; 0: all is."""
    backup_trouble: str = ""
    """Why its backup does not go on."""
    archive_check: ArchiveCheck | None = None
    """None before anything was looked for in this session."""
    timelines: tuple[Timeline, ...] = ()
    """Timelines of its log behind the first one, with who began each of them and when."""
    ahead_ms: int = 0
    """Milliseconds that the time of its last batch stands ahead of the clocks of its owner and storages; 0 where it does
    not."""

    @property
    def lost_object(self) -> str:
        """What is gone from the store of its archive, as the daily look or the last attempt to trim found it; empty where
        nothing is known to be gone."""
        missing = "" if self.archive_check is None else self.archive_check.missing
        return missing or (self.archive_trouble if ObjectAbsent.code in self.archive_trouble else "")

    @property
    def backed_up_to(self) -> int | None:
        """The last id in the store, of a segment or of the tail; None where nothing is archived."""
        found = [one.last_id for one in (self.archived, self.backed_up) if one is not None]
        return max(found, default=None)

    @property
    def lost_now(self) -> int:
        """Committed transactions that would be lost with the cluster, where it is archived at all."""
        reached = self.backed_up_to
        return 0 if reached is None else max(0, self.committed - reached)


@dataclass(frozen=True, kw_only=True)
class ClientInstance:
    """One instance of an application at one server, while it has mounts there and for a while after."""

    name: str
    """In its certificate; without one `ANONYMOUS`."""
    role: str
    instance: str
    """As it calls itself."""
    peer: str
    version: str
    """Of its library."""
    state: str
    """live, hangs (its connection stands, and a heartbeat is overdue), gone"""
    epoch: int
    age_ms: int
    """Since its first mount; of one that is gone, since its last one ended."""
    quiet_ms: int
    """Since something was heard of it."""
    partitions: tuple[int, ...]
    appended: int = 0
    """Transactions that it wanted to append, refused ones, too."""
    appended_bytes: int = 0
    fed: int = 0
    fed_bytes: int = 0
    waiting: str = ""
    """Why it is not fed, where that is not its own doing: the archive is away."""


@dataclass(frozen=True, kw_only=True)
class ClientUse:
    """What all instances of a name use together, at one server."""

    name: str
    role: str
    mounts: int
    inflight_bytes: int
    """Received, and not answered."""
    slowed_ms: int
    """How long what it sent, or was to be fed, waited because of its quota."""
    slowed_ago_ms: int | None
    """Since that was so the last time; None: never."""
    refused_mounts: int


@dataclass(frozen=True, kw_only=True)
class ClientList:
    clients: tuple[ClientInstance, ...]
    names: tuple[ClientUse, ...]


@dataclass(frozen=True, kw_only=True)
class ClientTotals:
    """Of all applications at one server since it started."""

    instances: int = 0
    """Connected at this moment."""
    slowed_ms: int = 0
    """How long names waited because of their quotas, all together."""
    refused_mounts: int = 0
    """Of names that had as many as their quota or share."""
    slowed: tuple[str, ...] = ()
    """Names that had to wait in the last seconds."""


@dataclass(frozen=True, kw_only=True)
class ServerDescription:
    name: str
    cluster_key: UUID
    instance: UUID
    """New with every start of the process."""
    version: str
    uptime_ms: int
    is_connected: bool
    """To the coordinator. Otherwise the server goes on with what it has, and starts nothing new."""
    is_draining: bool
    is_leader: bool
    """It is the one that decides who owns what."""
    partitions: tuple[OwnedPartition, ...]
    vitals: Vitals | None = None
    """None where there is no process, as in a simulation."""
    clients: ClientTotals = field(default_factory=ClientTotals)
    metadata_backup: MetadataBackup | None = None
    """Only of the leader, where storages archive."""
    keeps_group_log: bool = False
    """Whether it can own the group log. An older version would stop to follow who owns what."""
    groups: GroupTotals | None = None
    """None while it knows of no group log."""
