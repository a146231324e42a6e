"""The status values that daemons report to operators and to each other. Pure.

Every process reports its clock, its open files and its newest log lines; a storage reports its replicas; a server reports
the partitions that it owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import UUID

from waltzd.errors import WaltzError
from waltzd.errors.operations import ObjectAbsent
from waltzd.format.batch import End
from waltzd.format.finding import Finding
from waltzd.protocol.groups import GroupTotals
from waltzd.protocol.histogram import Histogram
from waltzd.protocol.timelines import FIRST, Timeline


@dataclass(frozen=True, kw_only=True)
class Vitals:
    """Resources of a process."""

    time_ms: int
    """Time of its clock, in milliseconds since 1970. Nothing is decided by it."""
    open_files: int | None
    """Open files, sockets and directories; None if the system does not report them."""
    open_files_max: int
    """Limit of the process; at the limit it can neither open a segment nor accept a connection."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A line of the log of a process. Logs never contain payloads."""

    number: int
    """Number of the line; it rises by one with each line of the process."""
    time_ms: int
    level: str
    """Level: debug, info, warning, error or critical."""
    text: str
    code: str | None
    """Code of the error that the line reports; None if it reports none."""


@dataclass(frozen=True, kw_only=True)
class Events:
    """The newest log lines of a process."""

    began_ms: int
    """Start of the process, in milliseconds since 1970. After a restart, the numbers of lines begin again."""
    events: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """The state of a replica: the values of its vote, or the reasons why it does not vote."""

    partition: int
    incarnation: UUID
    """Identity of the replica's files: a replica that was made again has another one."""
    promised_session: int
    """Highest session that the replica has promised to obey."""
    session: int
    """Session whose low-water mark was set last."""
    low_mark: int
    local_low_mark: int
    """Last id that the replica had when its low-water mark was set."""
    committed: int
    """Highest id on this replica that an owner reported as committed."""
    last_id: int
    is_available: bool
    is_full: bool
    segments: int
    findings: tuple[Finding, ...]
    damaged_segments: tuple[int, ...] = ()
    """First ids of the segment files that would repair the replica, in the order in which they can be installed."""
    contact: int = 0
    """Number of the opening of the replica. A call that changes the replica carries it, and is refused after the next."""
    end: End | None = None
    """End of its last batch; None if its last segment is of format 0 or unreadable."""
    tail: str = ""
    """Hash of its last records of format 0, in an answer to its owner; empty if they are in batches, or unknown."""
    archives: bool = False
    """Whether the storage can upload sealed segments."""
    floor: int = 0
    """First id that it has; 0 if it has all. Lower ids are only in the archive."""
    timelines: tuple[Timeline, ...] = ()
    """Timelines of its log after the first one, as it has stored them; its records belong to the last one."""
    untrimmed: str = ""
    """Reason why it keeps segments below the floor that its owner set last; empty if it keeps none."""
    time: int = 0
    """Time at which it was opened, in microseconds since 1970 by the clock of the storage; 0 from older versions."""
    version: str = ""
    """Version of the storage; empty from versions before 0.1."""

    @property
    def timeline(self) -> UUID:
        """Identity of the timeline that its records belong to."""
        return self.timelines[-1].identity if self.timelines else FIRST

    @property
    def is_sound(self) -> bool:
        """True if no damage was found. A damaged replica does not vouch for its records."""
        return not self.findings

    @property
    def certain(self) -> int:
        """Highest id that it never cuts."""
        known = max(self.low_mark, self.committed)
        return min(known, self.last_id) if self.is_sound else known

    def sentence(self) -> str:
        """Return the state in one sentence."""
        start = f"partition {self.partition}: "
        if self.findings:
            return f"{start}damaged, {self.findings[0].sentence()}"
        if not self.is_available:
            return f"{start}taken offline by an operator"
        full = "; writes wait for disk space" if self.is_full else ""
        return f"{start}holds ids up to {self.last_id}, session {self.promised_session}{full}"


@dataclass(frozen=True, kw_only=True)
class PartitionDescription:
    """One partition on a storage. If its files cannot be used, `status` is None and `refused` is the reason."""

    partition: int
    status: ReplicaStatus | None
    refused: WaltzError | None
    story: str
    queued_bytes: int
    disk_bytes: int


@dataclass(kw_only=True)
class Statistics:
    """Counters of a storage since its start."""

    appended_records: int = 0
    appended_bytes: int = 0
    groups: int = 0
    """Groups of appends, each of which was written and flushed at once."""
    group_microseconds: int = 0
    group_microseconds_max: int = 0
    checkpoints: int = 0
    read_records: int = 0
    read_bytes: int = 0
    refused_calls: int = 0
    flush: Histogram = field(default_factory=Histogram)
    """Durations of writing and flushing a group."""

    def plus(self, other: Statistics) -> Statistics:
        """Return the sums of both."""
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
    """The directory of a partition that was removed from its storage."""

    name: str
    bytes: int
    kept_ms: int = 0
    """Milliseconds since the removal, or since the start of the storage if that is later."""


@dataclass(frozen=True, kw_only=True)
class ScrubStatus:
    """The progress of the scrub, which reads sealed segments to find damage."""

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
    """Last damage that was found; empty if none was."""


@dataclass(frozen=True, kw_only=True)
class StorageDescription:
    cluster_key: UUID
    partitions: int
    """Number of partitions of the cluster."""
    directory: str
    version: str
    free_bytes: int
    uptime_ms: int
    is_draining: bool
    assigned: tuple[PartitionDescription, ...]
    statistics: Statistics
    vitals: Vitals | None = None
    """Resources of the process; None in a simulation, which has no process."""
    instance: UUID | None = None
    """Identity of the process; None in a simulation."""
    free_bytes_min: int = 0
    """Free bytes below which appends are refused; 0 from older versions."""
    name: str = ""
    """Name that its directory has stored; empty until one was set."""
    set_aside: tuple[SetAside, ...] = ()
    formats: tuple[int, ...] = (0,)
    """Formats of segments that it can write."""
    keeps_group_log: bool = False
    """Whether it can hold a replica of the group log; older versions cannot."""
    scrub: ScrubStatus | None = None
    """Progress of the scrub; None from older versions."""

    def is_same_as(self, other: StorageDescription) -> bool:
        """Return whether both describe one storage, under two addresses: the same process, or the same files."""
        return (self.instance is not None and self.instance == other.instance) or bool(
            self._incarnations & other._incarnations
        )

    @property
    def _incarnations(self) -> set[UUID]:
        """Incarnations of its replicas; no two storages share one."""
        return {one.status.incarnation for one in self.assigned if one.status is not None}


@dataclass(frozen=True, kw_only=True)
class VerifySummary:
    """The amount of data that was verified in one partition."""

    partition: int
    segments: int
    records: int
    bytes: int
    findings: int


DIVERGED = "DIVERGED"
"""State of a replica that holds another history than the log. It does not count until it is replaced."""


@dataclass(frozen=True, kw_only=True)
class OwnedReplica:
    """One replica of an owned partition, as its owner sees it."""

    storage: str
    role: str
    state: str
    """One of CONNECTING, SETTLING, LIVE, SLOW, CATCHING_UP, DAMAGED, GIVEN_UP, DIVERGED, DOWN."""
    durable_id: int
    counts: bool
    """Whether its acknowledgements count for commits."""
    story: str


@dataclass(frozen=True, kw_only=True)
class PartitionStatistics:
    """Counters of a partition since this process owns it. They only rise, and restart from 0 when the owner changes."""

    attempts: int = 0
    """Transactions that clients sent: committed, rejected, and those without an outcome from this process."""
    committed: int = 0
    committed_bytes: int = 0
    """Bytes of the records of committed transactions, including 40 bytes around each payload."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Rejected transactions, by the name of the `Reason`."""
    fed: int = 0
    """Transactions that were sent to mounts, counted once for each mount."""
    fed_bytes: int = 0
    commit: Histogram = field(default_factory=Histogram)
    """Latency of each committed transaction, from the arrival of its batch to its outcome."""


@dataclass(frozen=True, kw_only=True)
class Archived:
    """The newest known manifest of a partition's archive. The defaults mean that there is none."""

    archive: UUID | None = None
    """Identity of the archive, which is also in its label in the store."""
    number: int = 0
    """Number of the manifest."""
    sha256: str = ""
    """SHA-256 of the manifest, which contains the hashes of all objects."""
    last_id: int = -1
    """Last id in the archive; all lower ids are in it, too."""
    timeline: UUID = FIRST
    """Identity of the timeline whose log the manifest names."""


@dataclass(frozen=True, kw_only=True)
class RestoreOrder:
    """An order to a storage: restore one replica from an archive, up to an id."""

    store: str
    """Address of the store, in the form of the setting `archive`."""
    archive: UUID
    cluster: UUID
    """Key of the archived cluster, which is in the headers of its segments."""
    partition: int
    number: int
    """Number of the manifest to read; the store may have a newer one."""
    sha256: str
    """SHA-256 of that manifest."""
    mark: int
    """Last id to restore."""
    session: int
    """Session at whose end the restored replica stands."""
    timelines: tuple[Timeline, ...] = ()
    """Timelines of the restored log after the first one."""
    source: UUID = FIRST
    """Identity of the timeline that the manifest belongs to."""
    completes: bool = False
    """Whether to complete an existing replica, which has promised `session`, with the ids that the archive of its storage
    proves after the replica's certain ones. `timelines` are those of the replica; the archive is not named."""
    looks: bool = False
    """With `completes`: change nothing, and only report the last id that the archive proves."""


@dataclass(frozen=True, kw_only=True)
class Restoring:
    """The progress of a restore of a replica."""

    bytes: int
    """Bytes of the store that were processed."""
    bytes_total: int
    kept: int = 0
    """Segments of an earlier attempt that were reused."""
    status: ReplicaStatus | None = None
    """State of the replica, once it is restored; None before."""
    proven_to: int | None = None
    """Last id that the archive proves, if `RestoreOrder.looks`; None otherwise."""


@dataclass(frozen=True, kw_only=True)
class BackedUp:
    """The progress of the backup of a partition: archived segments and unsealed records together."""

    last_id: int = -1
    moment: int = 0
    """Time up to which all committed transactions are in the store, in microseconds since 1970 by an owner's clock; 0 if
    unknown."""
    archives_first: bool = False
    """Whether nothing was uploaded because a sealed segment has to be archived first."""


@dataclass(frozen=True, kw_only=True)
class MetadataBackup:
    """The backup of the cluster's documents in the archive, as the leader reports it."""

    number: int = 0
    """Number of the newest object; 0 before there is one."""
    age_ms: int = -1
    """Milliseconds since the backup was last seen to be current; -1 if this server has never seen that."""
    trouble: str = ""
    """Reason why the backup does not progress; empty if it does."""


@dataclass(frozen=True, kw_only=True)
class ArchiveCheck:
    """The progress of the periodic check that the store still has all archived objects."""

    last_id: int = -1
    """Last id up to which all objects were found."""
    missing: str = ""
    """First object that is missing or has changed; empty if there is none."""
    age_ms: int | None = None
    """Milliseconds since the start of the last complete check; None before the first. Only owners report it."""


@dataclass(frozen=True, kw_only=True)
class OwnedPartition:
    partition: int
    generation: int
    session: int
    step: str
    """Step of recovery: VOTING, RECORDING, SETTLING, ADMITTING, OPEN or CLOSED."""
    waiting: str
    """The event that it waits for, in one sentence; empty if there is none."""
    committed: int
    last_id: int
    low_mark: int
    mounts: int
    tail_bytes: int
    replicas: tuple[OwnedReplica, ...]
    statistics: PartitionStatistics = field(default_factory=PartitionStatistics)
    format: int = 0
    """Format of the segments that the session writes."""
    trouble: str = ""
    """Documents in ZooKeeper that are missing or corrupt; the owner continues with their last known content."""
    archived: Archived | None = None
    """How far its archive reaches; None if none of its storages has ever archived."""
    archive_trouble: str = ""
    """Reason why its archive does not progress; empty if it does."""
    backed_up: BackedUp | None = None
    """How far its backup reaches; None if nothing was backed up in this session."""
    backup_lag_ms: int = 0
    """Age of the oldest committed transaction that is not backed up, in milliseconds; 0 if all are."""
    backup_trouble: str = ""
    """Reason why its backup does not progress; empty if it does."""
    archive_check: ArchiveCheck | None = None
    """Progress of the check of its archived objects; None before the first one in this session."""
    timelines: tuple[Timeline, ...] = ()
    """Timelines of its log after the first one, with the time and the operator of each."""
    ahead_ms: int = 0
    """Milliseconds by which the time of its last batch is ahead of the clocks of its owner and storages; 0 if it is not."""

    @property
    def lost_object(self) -> str:
        """Object that is missing in its archive, found by the daily check or the last attempt to trim; empty if there is
        none."""
        missing = "" if self.archive_check is None else self.archive_check.missing
        return missing or (self.archive_trouble if ObjectAbsent.code in self.archive_trouble else "")

    @property
    def backed_up_to(self) -> int | None:
        """Last id in the store, in a segment or in unsealed records; None if nothing is archived."""
        found = [one.last_id for one in (self.archived, self.backed_up) if one is not None]
        return max(found, default=None)

    @property
    def lost_now(self) -> int:
        """Number of committed transactions that are not in the store; 0 without an archive."""
        reached = self.backed_up_to
        return 0 if reached is None else max(0, self.committed - reached)


@dataclass(frozen=True, kw_only=True)
class ClientInstance:
    """One instance of an application on one server, while it has mounts there and for a while after."""

    name: str
    """Name in its certificate; `ANONYMOUS` without one."""
    role: str
    instance: str
    """Name that the instance reports for itself."""
    peer: str
    version: str
    """Version of its client library."""
    state: str
    """One of live, hangs (its connection is open and a heartbeat is overdue), gone."""
    epoch: int
    age_ms: int
    """Milliseconds since its first mount; for an instance that is gone, since the end of its last one."""
    quiet_ms: int
    """Milliseconds since it last sent anything."""
    partitions: tuple[int, ...]
    appended: int = 0
    """Transactions that it sent to be appended, including rejected ones."""
    appended_bytes: int = 0
    fed: int = 0
    fed_bytes: int = 0
    waiting: str = ""
    """Reason on the server's side why the client is not fed, such as an unreachable archive; empty if there is none."""


@dataclass(frozen=True, kw_only=True)
class ClientUse:
    """The resources that all instances of a name use on one server."""

    name: str
    role: str
    mounts: int
    inflight_bytes: int
    """Bytes of transactions that were received and have no outcome yet."""
    slowed_ms: int
    """Milliseconds for which its transactions, or its feed, waited because of its quota."""
    slowed_ago_ms: int | None
    """Milliseconds since the last such wait; None if there was none."""
    refused_mounts: int


@dataclass(frozen=True, kw_only=True)
class ClientList:
    clients: tuple[ClientInstance, ...]
    names: tuple[ClientUse, ...]


@dataclass(frozen=True, kw_only=True)
class ClientTotals:
    """The totals of all applications on one server since its start."""

    instances: int = 0
    """Instances that are connected now."""
    slowed_ms: int = 0
    """Milliseconds for which all names together waited because of their quotas."""
    refused_mounts: int = 0
    """Mounts that were refused because the name had reached its quota or share."""
    slowed: tuple[str, ...] = ()
    """Names that had to wait in the last seconds."""


@dataclass(frozen=True, kw_only=True)
class ServerDescription:
    name: str
    cluster_key: UUID
    instance: UUID
    """Identity of the process: every start has a new one."""
    version: str
    uptime_ms: int
    is_connected: bool
    """Whether ZooKeeper answers. Without it, the server keeps its partitions and takes no new ones."""
    is_draining: bool
    is_leader: bool
    """Whether it is the leader, which assigns partitions to servers."""
    partitions: tuple[OwnedPartition, ...]
    vitals: Vitals | None = None
    """Resources of the process; None in a simulation, which has no process."""
    clients: ClientTotals = field(default_factory=ClientTotals)
    metadata_backup: MetadataBackup | None = None
    """Backup of the cluster's documents; None except on the leader of a cluster with an archive."""
    keeps_group_log: bool = False
    """Whether it can own the group log; an older version cannot read an assignment that has one."""
    groups: GroupTotals | None = None
    """Totals of consumer groups; None while there is no group log."""
