"""Errors that an application handles: code, exit code, whether a retry helps, and a text in three parts.

A row of the table of errors is a class: programs read its arguments, people read its docstring. The docstring explains
the error, followed by `Not done:` and `Next:`. `explain` splits it, for `waltzctl errors lookup CODE`, for
docs/errors.md, and for an error that is raised without its own text for the last two parts. Mistakes of the programmer
are assertions and never belong in this table. Errors that no application handles by their class are in
`waltzd.errors.operations`, with the table of all codes; an application that catches `WaltzError` catches them as well.
"""

from __future__ import annotations

import enum
import re
from functools import cached_property
from typing import ClassVar

__all__ = [
    "AppendConditionFailed",
    "ApplyFailed",
    "ArchiveAway",
    "BadArgument",
    "BeyondLog",
    "CannotConnect",
    "ClientAhead",
    "ClientClosed",
    "DatabaseUnavailable",
    "DeliveryLate",
    "Displaced",
    "EventUnknown",
    "EventUnreadable",
    "ForeignCluster",
    "GroupBeyondLog",
    "GroupExists",
    "GroupLogAway",
    "InboxPruned",
    "NeedsBatches",
    "NoGroupLog",
    "NoSuchChannel",
    "NoSuchGroup",
    "NoSuchPartition",
    "NotApplied",
    "NotGranted",
    "NotInGroup",
    "NotMounted",
    "NotPermitted",
    "NotReady",
    "NotSent",
    "OnlyInArchive",
    "OtherInbox",
    "OtherTimeline",
    "OtherView",
    "OutcomeUnknown",
    "PositionsDamaged",
    "Retry",
    "Superseded",
    "TlsMismatch",
    "TooLarge",
    "TransactionDeclined",
    "TransactionRefused",
    "Trimmed",
    "ViewBehind",
    "ViewStopped",
    "WaltzError",
]

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
"""Exit code of a daemon that ended because of an internal error."""
EXIT_DISK_FAULT = 74
"""Exit code of a daemon that ended because a failed flush or write left the content of the disk unknown."""

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
    """Advice to a caller about repeating a request."""

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
        """Return what was not done, as given by the raiser or else by the table."""
        return self._not_done or explain(type(self))[1]

    @property
    def detail_next_step(self) -> str:
        """Return the next step, as given by the raiser or else by the table."""
        return self._next_step or explain(type(self))[2]

    @cached_property
    def __notes__(self) -> list[str]:  # type: ignore[override]  # a cached property can be assigned to
        """Lines that Python prints below an uncaught error: what was not done, and what to do next."""
        return [*self.lines()[1:], f"`waltzctl errors lookup {self.code}` explains this error."]

    def number(self, fact: str) -> int | None:
        """Return a fact as a number; None if it is missing or not a number."""
        text = self.facts.get(fact, "")
        return int(text) if _NUMBER.fullmatch(text) else None

    def lines(self) -> list[str]:
        """Return the error as lines for an operator."""
        out = [f"{self.code} {self.message}"]
        if self.detail_not_done:
            out.append(f"Not done: {self.detail_not_done}")
        if self.detail_next_step:
            out.append(f"Next: {self.detail_next_step}")
        return out


def explain(cls: type[WaltzError]) -> tuple[str, str, str]:
    """Return what an error means, what was not done, and the next step. `WaltzError` itself has only the first of them."""
    text, _, rest = " ".join((cls.__doc__ or "").split()).partition(" Not done: ")
    not_done, _, next_step = rest.partition(". Next: ")
    return text, not_done, next_step.removesuffix(".")


class BadArgument(WaltzError, code="W1001", exit_code=EXIT_USAGE, status="INVALID_ARGUMENT"):
    """A value on the command line or in a request is invalid: a negative id, a path of the wrong kind, or a name given
    twice. Not done: nothing was changed. Next: correct the value and try again."""


class ForeignCluster(WaltzError, code="W2002", exit_code=EXIT_CONFLICT, status="PERMISSION_DENIED"):
    """The cluster key of the caller, or of a file, is not the key of this storage directory. Data of two clusters is
    never mixed. Not done: nothing was read or written. Next: compare the cluster keys; point the caller or the path at
    the right cluster."""


class NoSuchPartition(WaltzError, code="W2007", exit_code=EXIT_NOT_FOUND, status="NOT_FOUND"):
    """The partition is not assigned to this storage, or its number is outside the range of the cluster. Not done:
    nothing was done. Next: list the partitions of the storage, or create the partition there."""


class NoSuchChannel(WaltzError, code="W2300", exit_code=EXIT_NOT_FOUND, status="NOT_FOUND"):
    """The cluster has no channel of this name: it was mistyped, removed, or never created. The error is also given for
    a channel in which the policy grants the application nothing. Not done: nothing was done. Next: `waltzctl channel
    list` shows them; `waltzctl channel set NAME PARTITIONS` makes one."""


class NoSuchGroup(WaltzError, code="W2306", exit_code=EXIT_NOT_FOUND, status="NOT_FOUND"):
    """The cluster has no consumer group of this name: it was mistyped, deleted, or never created; or the group that was
    meant was deleted and another one created under its name. Not done: nothing was done. Next: `waltzctl group list`
    shows them; make it with `waltzctl group create` or `Client.create_group`."""


class GroupExists(WaltzError, code="W2307", exit_code=EXIT_CONFLICT, status="ALREADY_EXISTS"):
    """A consumer group of this name exists with other settings. Creating it again with the same settings changes
    nothing; other settings would silently change what members rely on. The mode, the key and the partitions of a group
    never change. Not done: the group stays as it is. Next: look at it with `waltzctl group describe`; change its
    settings with `waltzctl group set`, or take another name."""


class NoGroupLog(WaltzError, code="W2308", exit_code=EXIT_NOT_FOUND, retry=Retry.LATER, status="FAILED_PRECONDITION"):
    """The cluster has no group log yet: an older version of Waltz created the cluster and no consumer group was ever
    created there, or this server has not heard of the group log yet. The first `waltzctl group create` creates it,
    while the cluster runs. Not done: nothing was done. Next: create the first group with `waltzctl group create`, as an
    operator."""


class GroupLogAway(WaltzError, code="W2309", exit_code=EXIT_TIMEOUT, retry=Retry.LATER, status="UNAVAILABLE"):
    """The group log did not answer in time: it has no owner, or no majority of its replicas. So the state of consumer
    groups is unknown. Active groups continue for a while; a change without an answer may have been written
    nevertheless. Not done: the change is not known to be durable. Next: look at the group log with `waltzctl doctor`;
    try again when it has an owner and a majority."""


class GroupBeyondLog(WaltzError, code="W2310", exit_code=EXIT_CONFLICT, status="FAILED_PRECONDITION"):
    """The position of a consumer group is above the last id of its partition. Continuing would skip the transactions
    that get these ids later. The partition may have been restored to an earlier moment. Not done: nothing was
    delivered. Next: name an id of the log; move a group that is beyond it with `waltzctl group reset`."""


class NotInGroup(WaltzError, code="W2311", exit_code=EXIT_NOT_FOUND, status="NOT_FOUND"):
    """The partition does not belong to this consumer group: the group names other partitions, or a channel that it
    names was changed. Members can join only in the partitions of their group. Not done: nothing was delivered. Next:
    list the partitions of the group with `waltzctl group describe`, and join there."""


class DeliveryLate(WaltzError, code="W2313", exit_code=EXIT_CONFLICT, status="FAILED_PRECONDITION"):
    """An acknowledgement came too late, or belongs to another epoch than its delivery: the delivery timed out, the
    connection broke, the partition has another owner, the group was reset, or the subscription is closed. The
    transaction was or will be delivered again, so its work must be idempotent. The position of the group is unchanged.
    Not done: the acknowledgement was ignored, and the transaction is delivered again. Next: continue; extend deliveries
    that take longer than the group's ack_wait, and make the work idempotent."""


class BeyondLog(WaltzError, code="W2011", exit_code=EXIT_NOT_FOUND, retry=Retry.ELSEWHERE, status="OUT_OF_RANGE"):
    """A read asked for ids that this replica does not hold, or that a caller without a session may not see yet. Not
    done: nothing was returned. Next: ask for ids within the range that the message names, or ask another replica."""


class TooLarge(WaltzError, code="W2013", status="RESOURCE_EXHAUSTED"):
    """A record, frame or request is larger than the limit that applies to it. Not done: nothing of it was written.
    Next: send less at once, or raise the limit in the configuration of every storage."""


class ClientAhead(WaltzError, code="W2017", exit_code=EXIT_UNSAFE, status="FAILED_PRECONDITION"):
    """The caller has applied transactions that this partition does not have. Its database belongs to another cluster,
    or this cluster lost transactions that it had acknowledged. Not done: nothing was read or written. Next: check that
    the client's database belongs to this cluster; do not reset its position before you know why."""


class NeedsBatches(WaltzError, code="W2029", exit_code=EXIT_UNSAFE, status="FAILED_PRECONDITION"):
    """Segments of format 0 cannot hold what was asked for: a group of transactions, or a lookup by time or by lock. The
    partition writes format 0, or did so at the position in question. Not done: nothing was written. Next: change the
    cluster over with `waltzctl cluster set --format 1`."""


class Displaced(WaltzError, code="W2019", status="ABORTED"):
    """The same client has mounted this partition again on a newer stream, so this stream ended. Not done: requests
    without an answer are decided by the newer mount. Next: use one client object per client id."""


class OtherTimeline(WaltzError, code="W2338", exit_code=EXIT_CONFLICT, status="FAILED_PRECONDITION"):
    """A position belongs to another timeline of the partition's log. An operator ended that log at an earlier id (by a
    rescue, a restore to a moment, or a restore of documents with a loss), and above the fork the same ids are other
    transactions. The facts `fork`, `position` and `timeline` are the last id that both timelines share, the position,
    and the current timeline. Not done: nothing above the fork was accepted, and nothing was read or written there.
    Next: look at the timelines with `waltzctl partition describe`; reset the position to the fork, and undo the effects
    of the transactions above it."""


class NotPermitted(WaltzError, code="W2024", exit_code=EXIT_NOT_AUTHORISED, status="PERMISSION_DENIED"):
    """The certificate of the caller does not have the role that this call needs. Not done: nothing was read or written.
    Next: use a certificate whose role permits this call."""


class NotGranted(WaltzError, code="W2036", exit_code=EXIT_NOT_AUTHORISED, status="PERMISSION_DENIED"):
    """The policy of the cluster has no grant that allows the call to the name in the caller's certificate (`anonymous`
    without certificates). A mount that loses a right ends with this error after the outcomes that were decided
    by then; its other requests in flight are in the log or not. Not done: nothing was read or written. Next: an
    operator grants it with `waltzctl policy set FILE`; `waltzctl policy explain NAME PARTITION` says why not."""


class Superseded(WaltzError, code="W2051", exit_code=EXIT_CONFLICT, status="ABORTED"):
    """A newer instance of this application was registered, and only one instance of its name may live. Requests of this
    instance are rejected where the newer one has mounted. Earlier requests are in the log or not; the newer instance
    sees which. This error ends an instance that was paused or cut off and replaced meanwhile. Not done: requests
    without an answer are decided; the log tells how. Next: end this instance; `waltzctl client list NAME` shows the
    newer one."""


class NotSent(WaltzError, code="W2060", exit_code=EXIT_TIMEOUT, retry=Retry.LATER):
    """A transaction waited longer than the client's `submit_seconds` and never left the process: the owner of the
    partition could not be reached, was still recovering, or did not decide earlier requests. The message names the
    cause. The transaction is certainly not in the log. Not done: the transaction was not sent, and is not in the log.
    Next: submit it again; if it lasts, look at the partition and its owner."""


class NotMounted(WaltzError, code="W2061", exit_code=EXIT_CONFLICT):
    """The client has not mounted the partition: it was not among the client's partitions, or was removed from them.
    Not done: the transaction was not sent, and is not in the log. Next: name the partition among the client's
    partitions: at its start, or with set_partitions."""


class ViewStopped(WaltzError, code="W2062", exit_code=EXIT_FINDINGS):
    """The application's view could not apply a transaction and returned STOP. The partition stops in front of that
    transaction: nothing after it is applied, and the client accepts no transactions for the partition. The log is
    unchanged. Not done: the transaction that the message names, and those after it, were not applied here. Next: repair
    the view or its database, then remove the partition with set_partitions and add it again."""


class ClientClosed(WaltzError, code="W2063"):
    """The client is closed, or was not opened yet, so it accepts no transactions. Not done: the transaction was not
    sent, and is not in the log. Next: use the client inside its `async with` or `with` block."""


class DatabaseUnavailable(WaltzError, code="W2080", exit_code=EXIT_TIMEOUT, retry=Retry.LATER):
    """The application's database did not accept a change: it cannot be reached, is locked, or asked to try again.
    Whether the last commit took effect is unknown; the stored position tells at the next attempt. Nothing is applied
    twice. Not done: the transactions from this id on are not applied yet, unless their commit was under way. Next: the
    client tries again by itself; if it lasts, look at the database."""


class ApplyFailed(WaltzError, code="W2081"):
    """The application's own function failed on a transaction of the log. Its database transaction was rolled back, so
    none of it is in the view, and later transactions of the partition wait. A view and its position change together or
    not at all. So the function must not commit, roll back, begin or close the database transaction: an attempt also
    raises this error. Not done: nothing of this transaction was applied; the view of this partition stays in front of
    it. Next: repair the function that applies transactions; the log cannot be changed."""


class ViewBehind(WaltzError, code="W2082", exit_code=EXIT_CONFLICT):
    """The position in the application's database is lower than what this client has already applied: the database was
    restored or edited while the client was running. Continuing would leave a gap in the view. Not done: nothing was
    applied to this partition's view. Next: start the client again: it continues from the position that the database has
    now."""


class OtherView(WaltzError, code="W2084", exit_code=EXIT_CONFLICT):
    """The application's database holds something else under the name of this view: the positions of another function,
    or a table of positions of an earlier version. Two functions under one name would each skip what the other one has
    applied. A function that was only renamed is accepted with `accept_rename=True`. Not done: nothing was applied.
    Next: give each view a name of its own."""


class OtherInbox(WaltzError, code="W2337", exit_code=EXIT_CONFLICT):
    """The inbox of this name in the application's database belongs to another consumer group. Two groups under one name
    would each skip what the other one has handled. Not done: nothing was done. Next: give the inbox of each group a
    name of its own, with `name=`."""


class InboxPruned(WaltzError, code="W2339", exit_code=EXIT_CONFLICT):
    """The id of a delivery was pruned from the inbox, up to the floor of the group at that time, and was not parked
    then. The group delivers it again because it was reset, or because its floor went back at a change of owner. The
    inbox cannot tell any more whether the transaction was handled, so it was not handled now. Not done: the transaction
    was not handled. Next: to handle it, let the inbox forget the id, `inbox.forget(…)`, and replay it; else discard it."""


class NotApplied(WaltzError, code="W2086", exit_code=EXIT_TIMEOUT, retry=Retry.LATER):
    """A view had not applied a transaction when the caller's timeout was over. The transaction is in the log, and the
    view will apply it. The process that applies is slow, stopped, or fails on an earlier transaction. Not done: what
    the view shows does not contain the transaction yet. Next: answer from the view as it is, or try again; if it lasts,
    look at the process that applies."""


class EventUnreadable(WaltzError, code="W2089"):
    """A payload in the log is not an event that the application's serializer can read: it is not JSON or MessagePack,
    lacks the envelope of `type`, `version` and `data`, or its data does not fit its type. Another program wrote it, or
    the class of the event was changed without a new version. Not done: nothing was made of this payload. Next: give the
    event type a new version, and a function that brings older data up to it."""


class OutcomeUnknown(WaltzError, code="W2131", exit_code=EXIT_TIMEOUT):
    """A transaction was sent, and no outcome arrived in time. It may be in the log, get into it while its owner stays
    the owner, or never. Not done: whether the transaction is in the log is not known. Next: look for it in the log
    before you append it again."""


class TransactionRefused(WaltzError, code="W2130", exit_code=EXIT_CONFLICT, retry=Retry.LATER):
    """A transaction was refused, because of a lock or because a fail-over lost it. It is certainly not in the log. The
    message names the lock, the reason and the id that stands against it: CONFLICT, a committed transaction marked the
    lock; IN_FLIGHT, one that is not decided yet; TOO_FAR_BEHIND, the owner no longer knows; OWNER_CHANGED, the owner is
    new and does not know yet; NOT_IN_LOG, it never reached the log. `waltzctl lock explain` tells more. Not done: the
    transaction is not in the log. Next: read what was written meanwhile, then append it with a higher position (--mark)
    if it still holds."""


class TransactionDeclined(WaltzError, code="W2134", exit_code=EXIT_CONFLICT):
    """The application's command declined to build a transaction (`Builder.decline`), and its caller asked for an error
    (`outcome.or_raise()`). The message is the reason that the command gave. Not done: nothing was sent. Next: show the
    reason to the user."""


class AppendConditionFailed(WaltzError, code="W2133", exit_code=EXIT_CONFLICT):
    """An event matches the query of the append condition (`waltzd.dcb`), after the position that the decision has seen.
    The fact `position` names one such event. Not done: no event was appended. Next: read the events again, and decide
    anew."""


class EventUnknown(WaltzError, code="W2088", retry=Retry.LATER):
    """An event in the log has a type that this program does not know, or a newer version of a known type. A newer
    program wrote it. A SQL view tries it again until a program that knows it runs, and never writes it as a dead
    letter. Not done: nothing was made of this event. Next: install the program that knows it here, too: those that read
    before those that write."""


class PositionsDamaged(WaltzError, code="W2087", exit_code=EXIT_FINDINGS):
    """The file in which a follower keeps its positions is damaged. Starting from a guess would skip transactions or
    repeat them. Not done: nothing was fed. Next: put the file back from a backup; or remove it, empty what the follower
    feeds, and begin at the start."""


class Trimmed(WaltzError, code="W2267", exit_code=EXIT_NOT_FOUND, retry=Retry.ELSEWHERE, status="OUT_OF_RANGE"):
    """The requested ids are only in the archive: an operator has set `--keep-local`, and the storages have removed what
    is below the floor of the partition. Nothing is lost. The message names the first id that replicas still have. The
    group log is trimmed automatically: everything below its floor is repeated above it. Not done: nothing was returned.
    Next: read these ids from the archive, or begin at the id that the message names."""


class CannotConnect(WaltzError, code="W4001", exit_code=EXIT_TIMEOUT, retry=Retry.LATER):
    """The other side did not answer in time, or refused the connection. Whether a running call took effect is unknown.
    Not done: the outcome of the call is unknown. Next: check that the daemon runs and that the address is right, then
    try again."""


class TlsMismatch(CannotConnect, code="W4003", exit_code=EXIT_USAGE):
    """One side of a connection uses TLS and the other plain text. A daemon with certificates in its configuration
    answers only callers with certificates, and one without them only callers without. Not done: nothing was asked of
    the daemon. Next: use certificates on both sides, or on neither."""


class NotReady(WaltzError, code="W2018", retry=Retry.LATER, status="UNAVAILABLE"):
    """The server owns the partition and cannot serve it now. It is still recovering it and waits for the storages that
    the message names, or for an operator; or no replica returned committed transactions that have left its memory, for
    the reasons in the message. Nothing is lost. Readers try again automatically. Not done: nothing was read or written.
    Next: wait; if it lasts, look at the storages that the message names."""


class OnlyInArchive(WaltzError, code="W2270", exit_code=EXIT_NOT_FOUND, status="FAILED_PRECONDITION"):
    """The ids are only in the archive, and this server has no `archive` in its configuration, so it cannot read them.
    Newer ids are read as before. `waltzctl archive status` shows where the archive is and which ids it holds. Not done:
    nothing was read. Next: set `archive` in the configuration of each server, with the store of the storages, and start
    them again; or read the archive itself: `waltzctl spark-export --source STORE`."""


class ArchiveAway(WaltzError, code="W2271", exit_code=EXIT_TIMEOUT, retry=Retry.LATER):
    """The ids are only in the archive, and its store cannot be read now; the message quotes the store. Mounts wait
    for it with growing pauses. Reads of newer ids and appends continue. Not done: nothing was read. Next: check that
    the store is up and that the server may read it; nothing has to be restarted."""
