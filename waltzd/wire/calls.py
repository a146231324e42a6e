"""Every call of the gRPC services, declared once.

A row names the messages of a call, its reply as a plain value, the roles that may make it, and its line in the audit
log. Three generic classes use the rows: the calling side (`grpc.Caller`) packs requests and unpacks replies, the
answering side (`servicer`) does the opposite, and a transport within one process passes values without packing. Names
of methods and messages are those of `wire.proto`. There is no call without a row, and no row without roles.

`about` never contains a payload, a token or a secret.
"""

from __future__ import annotations

import enum
import operator
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeAlias, TypeVar

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from waltzd.cluster.groups import GroupList, MadeGroup
from waltzd.errors import WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.format.batch import Batch
from waltzd.format.finding import Finding
from waltzd.format.key_index import LockMarks
from waltzd.format.record import HASH_BYTES, Digest, Run, id_and_length, is_sound_record, walk
from waltzd.protocol.batches import Registration, ServerFrame, Topology
from waltzd.protocol.descriptions import (
    ArchiveCheck,
    Archived,
    BackedUp,
    ClientList,
    Events,
    ReplicaStatus,
    Restoring,
    ServerDescription,
    SetAside,
    StorageDescription,
    VerifySummary,
)
from waltzd.protocol.groups import Changed, DeliveryFrame, GroupStatus, ParkedList
from waltzd.protocol.locks import History, HistoryPart, LockExplanation, MarkedPage
from waltzd.protocol.peers import Content
from waltzd.protocol.positions import Position
from waltzd.protocol.role import Role
from waltzd.protocol.timelines import FIRST
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.codec import (
    checked_pieces,
    checked_run,
    delivery_frames,
    delivery_message,
    detail_of,
    error_of_detail,
    lock_history_message,
    lock_history_of,
    pieces_message,
    run_message,
    server_frames,
    server_message,
    to_message,
    to_value,
    uuid_of,
)

R = TypeVar("R")
About: TypeAlias = tuple[Iterable[int], str]
"""Partitions of a request, and other text of it for the audit log."""


class Audit(enum.Enum):
    """Condition under which a call is recorded in the audit log. A call that is denied for lack of a right always is."""

    CHANGE = "always"
    READ = "where an operator reads payloads: to servers and applications it is daily work"
    LOOK = "never"


@dataclass(frozen=True, eq=False)
class Call(Generic[R]):
    service: str
    name: str
    request: type[Message]
    reply: type[Message]
    pack: Callable[[R], Any]
    """Function from the value of the reply to its message."""
    unpack: Callable[[Any, Any, str], R]
    """Function from reply, request and address of the answering side to the value of the reply. Raises `BadFrame` if
    the reply is malformed."""
    roles: frozenset[Role]
    audit: Audit
    about: Callable[[Any], About]
    """Function from the request to its part of the audit log."""

    @property
    def path(self) -> str:
        return f"/waltz.v1.{self.service}/{self.name}"


CALLS: dict[str, Call[Any]] = {}
"""All calls by path."""


def _call(
    path: str,
    roles: frozenset[Role],
    pack: Callable[[R], Any],
    unpack: Callable[[Any, Any, str], R],
    audit: Audit = Audit.CHANGE,
    about: Callable[[Any], About] = lambda said: ((), ""),
) -> Call[R]:
    service, _, name = path.partition("/")
    method = wire.DESCRIPTOR.services_by_name[service].methods_by_name[name]
    request, reply = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    assert roles, "somebody may make it"
    made = Call(service, name, request, reply, pack, unpack, roles, audit, about)
    CALLS[made.path] = made
    return made


def _value(path: str, roles: frozenset[Role], kind: type[R], *note: Any) -> Call[R]:
    """Declare a call whose reply has the fields of a plain value."""
    made: Call[R] = _call(
        path, roles, lambda value: to_message(made.reply, value), lambda reply, *_: to_value(kind, reply), *note
    )
    return made


def _field(path: str, roles: frozenset[Role], field: str, kind: Callable[[Any], R], *note: Any) -> Call[R]:
    """Declare a call whose reply is one field of its message."""
    made: Call[R] = _call(
        path, roles, lambda value: made.reply(**{field: value}), lambda reply, *_: kind(getattr(reply, field)), *note
    )
    return made


def _nothing(path: str, roles: frozenset[Role], *note: Any) -> Call[None]:
    """Declare a call whose reply is empty."""
    made: Call[None] = _call(path, roles, lambda _: made.reply(), lambda *_: None, *note)
    return made


def _about(form: str, partition: str = "") -> Callable[[Any], About]:
    """Return a function that describes a request for the audit log. `form` is formatted with the message as `said`;
    `partition` is the path of the field with its partition or partitions."""

    def about(said: Any) -> About:
        found = operator.attrgetter(partition)(said) if partition else ()
        return [found] if isinstance(found, int) else found, form.format(said=said)

    return about


class Transport(ABC):
    """Way of calls to the other side. The clients of storages and servers are written against it."""

    @abstractmethod
    async def _ask(self, call: Call[R], request: Any, seconds: float | None = None) -> R:
        """Make a call and return its value. `seconds` is for a call that may take longer than others."""

    @abstractmethod
    def _each(self, call: Call[R], request: Any) -> AsyncGenerator[R, None]:
        """Make a call that is answered by a stream, and yield its values. A reader that may stop early closes it."""


# -- who may call what -------------------------------------------------------------------------------------------------


_SERVERS = frozenset({Role.SERVER})
_READERS = frozenset({Role.SERVER, Role.OPERATOR})
"""Roles that may read committed records. The storage refuses a call of an operator that carries a session."""
_OPERATORS = frozenset({Role.OPERATOR})
_LOOKING = frozenset({Role.OPERATOR, Role.OBSERVER})
"""Roles that may inspect a daemon. Observers see no payload and no digest of one."""
_APPLICATIONS = frozenset({Role.CLIENT, Role.OPERATOR})
_USERS = _APPLICATIONS | _SERVERS
"""Roles that may use a log. Servers may use only the group log."""

RIGHTS_OF_TOOLS: dict[str, frozenset[Role]] = {
    "/grpc.health.v1.Health/Check": _APPLICATIONS | _LOOKING | _SERVERS,
    "/grpc.health.v1.Health/Watch": _APPLICATIONS | _LOOKING | _SERVERS,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATORS,
}
"""Roles that may make the calls that gRPC itself defines. Those only read."""


def allowed(method: str) -> frozenset[Role]:
    """Return the roles that may make a call; none if it is not declared."""
    return CALLS[method].roles if method in CALLS else RIGHTS_OF_TOOLS.get(method, frozenset())


def roles_at(*services: str) -> frozenset[Role]:
    """Return the roles that may make at least one call of these services."""
    methods = [method for method in (*CALLS, *RIGHTS_OF_TOOLS) if method.split("/")[1] in services]
    return frozenset().union(*map(allowed, methods))


# -- a storage, for the owners of partitions ---------------------------------------------------------------------------


def _opened_message(opened: tuple[ReplicaStatus, int]) -> wire.ReplicaStatus:
    """Pack the status of a replica and the port of the storage for streams."""
    reply = to_message(wire.ReplicaStatus, opened[0])
    reply.stream_port = opened[1]
    return reply


def _opened(reply: wire.ReplicaStatus, *_: Any) -> tuple[ReplicaStatus, int]:
    return to_value(ReplicaStatus, reply), reply.stream_port


def _about_opening(said: wire.OpenRequest) -> About:
    return [said.target.partition], f"session={said.target.session}{' create=true' if said.create else ''}"


def _content_message(content: Content) -> wire.RunFrame:
    return pieces_message((content,) if isinstance(content, Run) else content)


def _content(reply: wire.RunFrame, request: wire.ReadRequest, address: str) -> Content:
    """Unpack records and verify their checksums, because the network may have damaged them."""
    if request.form != wire.READ_FORM_WHOLE:
        return checked_run(reply, address)
    pieces = checked_pieces(reply, address)
    return pieces[0] if isinstance(pieces[0], Run) else tuple(piece for piece in pieces if isinstance(piece, Batch))


def _segments_message(found: list[tuple[int, int, int]]) -> wire.SegmentList:
    return wire.SegmentList(
        segments=[wire.Segment(first_id=first, last_id=last, bytes=size) for first, last, size in found]
    )


def _segments(reply: wire.SegmentList, *_: Any) -> list[tuple[int, int, int]]:
    return [(found.first_id, found.last_id, found.bytes) for found in reply.segments]


_MARKED = Audit.CHANGE, _about("session={said.target.session} mark={said.mark}", "target.partition")
_FIRST = _about("first_id={said.first_id}", "target.partition")

OPEN = _call("Replica/Open", _SERVERS, _opened_message, _opened, Audit.CHANGE, _about_opening)
QUIET = _field("Replica/Quiet", _SERVERS, "partitions", tuple[int, ...], Audit.LOOK)
SET_LOW_MARK = _value("Replica/SetLowMark", _SERVERS, ReplicaStatus, *_MARKED)
TRUNCATE = _value("Replica/Truncate", _SERVERS, ReplicaStatus, *_MARKED)
TRIM = _value("Replica/Trim", _SERVERS, ReplicaStatus, *_MARKED)
FORK = _value(
    "Replica/Fork", _SERVERS, ReplicaStatus, Audit.CHANGE, lambda said: (
        [said.target.partition], f"timelines={len(said.timelines)}"
    )
)  # fmt: skip
READ = _call("Replica/Read", _READERS, _content_message, _content, Audit.READ, _FIRST)
READ_LOCKS = _call(
    "Replica/ReadLocks", _SERVERS, lock_history_message, lambda reply, *_: lock_history_of(reply), Audit.LOOK
)
REPLICA_FIND_TIME = _field("Replica/FindTime", _SERVERS, "mark", int, Audit.LOOK)
FIND_MARKS = _value("Replica/FindMarks", _SERVERS, LockMarks, Audit.LOOK)
LIST_SEGMENTS = _call("Replica/ListSegments", _READERS | _LOOKING, _segments_message, _segments, Audit.LOOK)
ARCHIVE = _value(
    "Replica/Archive", _SERVERS, Archived, Audit.CHANGE, _about("last_id={said.known.last_id}", "target.partition")
)
CHECK_ARCHIVE = _value("Replica/CheckArchive", _SERVERS, ArchiveCheck, Audit.CHANGE, _FIRST)
BACK_UP = _value(
    "Replica/BackUp", _SERVERS, BackedUp, Audit.CHANGE, _about("committed={said.committed}", "target.partition")
)
SAVE_METADATA = _field(
    "Replica/SaveMetadata", _SERVERS, "number", int, Audit.CHANGE, lambda said: ((), f"bytes={len(said.text)}")
)


# -- a storage, for operators ------------------------------------------------------------------------------------------


def _results_message(results: Mapping[int, WaltzError | str]) -> wire.PartitionsReply:
    """Pack for each partition its error, or the directory that was set aside."""
    reply = wire.PartitionsReply()
    for number, found in results.items():
        if isinstance(found, WaltzError):
            reply.results.add(partition=number, error=detail_of(found))
        else:
            reply.results.add(partition=number, set_aside=found)
    return reply


def _results(reply: wire.PartitionsReply, *_: Any) -> Mapping[int, WaltzError | str]:
    return {
        found.partition: error_of_detail(found.error) if found.HasField("error") else found.set_aside
        for found in reply.results
    }


def _digest_message(found: Digest) -> wire.DigestReply:
    return wire.DigestReply(hash=found.hash, last_id=found.last_id, records=found.records, bytes=found.bytes)


def _digest(reply: wire.DigestReply, request: wire.DigestRequest, address: str) -> Digest:
    found = Digest(first_id=request.first_id, last_id=reply.last_id, hash=reply.hash, bytes=reply.bytes)
    is_within = request.first_id <= found.last_id <= request.last_id
    if not is_within or len(found.hash) != HASH_BYTES or found.records != reply.records:
        raise BadFrame(f"{address} answered with a digest of other ids than {request.first_id} to {request.last_id}")
    return found


def _verification_message(found: Finding | VerifySummary) -> wire.VerifyReply:
    if isinstance(found, Finding):
        return wire.VerifyReply(finding=to_message(wire.Finding, found))
    return wire.VerifyReply(summary=to_message(wire.VerifySummary, found))


def _verification(reply: wire.VerifyReply, *_: Any) -> Finding | VerifySummary:
    return to_value(Finding, reply.finding) if reply.HasField("finding") else to_value(VerifySummary, reply.summary)


def _about_removal(said: wire.RemoveRequest) -> About:
    return said.partitions, f"files={'deleted' if said.delete_files else 'set-aside'}"


DESCRIBE_STORAGE = _value("StorageAdmin/Describe", _LOOKING | _SERVERS, StorageDescription, Audit.LOOK)
CREATE_PARTITIONS = _call(
    "StorageAdmin/CreatePartitions", _OPERATORS, _results_message, _results, Audit.CHANGE, _about("", "partitions")
)
REMOVE_PARTITIONS = _call(
    "StorageAdmin/RemovePartitions", _OPERATORS, _results_message, _results, Audit.CHANGE, _about_removal
)
SET_AVAILABLE = _call(
    "StorageAdmin/SetAvailable", _OPERATORS, _results_message, _results, Audit.CHANGE,
    lambda said: (said.partitions, f"available={said.available}".lower()),
)  # fmt: skip
VERIFY = _call(
    "StorageAdmin/Verify", _OPERATORS, _verification_message, _verification, Audit.CHANGE, _about("", "partitions")
)
DIGEST = _call("StorageAdmin/Digest", _OPERATORS, _digest_message, _digest, Audit.LOOK)
STORAGE_EVENTS = _value("StorageAdmin/Events", _LOOKING, Events, Audit.LOOK)
FENCE = _value("StorageAdmin/Fence", _OPERATORS, ReplicaStatus, Audit.CHANGE, _about("session={said.session}", "partition"))
RESTORE = _value(
    "StorageAdmin/Restore", _OPERATORS, Restoring, Audit.CHANGE,
    _about("mark={said.order.mark} session={said.order.session}", "order.partition"),
)  # fmt: skip
DELETE_SET_ASIDE: Call[Sequence[SetAside]] = _call(
    "StorageAdmin/DeleteSetAside", _OPERATORS,
    lambda found: wire.SetAsideReply(deleted=[to_message(wire.SetAside, one) for one in found]),
    lambda reply, *_: tuple(to_value(SetAside, one) for one in reply.deleted),
    Audit.CHANGE, lambda said: ((), f"names={','.join(said.names)}"),
)  # fmt: skip


# -- a server, for applications ----------------------------------------------------------------------------------------


def _position_message(found: Position, confirmed: bool = False) -> wire.MarkReply:
    timeline = None if found.timeline == FIRST else found.timeline.bytes
    return wire.MarkReply(mark=found, confirmed=confirmed, timeline=timeline)


def _position(reply: wire.MarkReply, *_: Any) -> Position:
    timeline = uuid_of(reply.timeline, "the timeline of a position") if reply.HasField("timeline") else FIRST
    return Position(reply.mark, timeline)


def _history_message(part: HistoryPart) -> wire.HistoryReply:
    found = part.history
    timeline = None if found.end.timeline == FIRST else found.end.timeline.bytes
    return wire.HistoryReply(ids=found.ids, end=found.end, has_more=found.has_more, timeline=timeline, through=part.through)


def _history(reply: wire.HistoryReply, request: wire.HistoryRequest, address: str) -> HistoryPart:
    timeline = uuid_of(reply.timeline, "the timeline of a position") if reply.HasField("timeline") else FIRST
    ids, after, before = tuple(reply.ids), request.after, reply.end + 1
    if request.HasField("before"):
        before = min(before, request.before)
    through = reply.through if reply.HasField("through") else None
    is_wrong = through is not None and not after < through < before
    if through is not None:
        after, before = (through - 1, before) if request.newest_first else (after, through + 1)
    around = (after, *(ids[::-1] if request.newest_first else ids), before)
    if is_wrong or len(ids) > request.limit or (ids and not all(one < other for one, other in pairwise(around))):
        raise BadFrame(f"{address} answered with a history of other ids than were asked for")
    end = Position(reply.end, timeline)
    history = History(partition=request.partition, ids=ids, end=end, has_more=reply.has_more)
    return HistoryPart(history=history, through=through)


def _marked_message(page: MarkedPage) -> wire.FetchMarkedReply:
    timeline = None if page.end.timeline == FIRST else page.end.timeline.bytes
    return wire.FetchMarkedReply(
        records=b"".join(page.records), end=page.end, timeline=timeline, through=page.through
    )  # fmt: skip


def _marked(reply: wire.FetchMarkedReply, request: wire.FetchMarkedRequest, address: str) -> MarkedPage:
    timeline = uuid_of(reply.timeline, "the timeline of a position") if reply.HasField("timeline") else FIRST
    data, bounds = memoryview(reply.records), walk(reply.records).tolist()
    records = tuple(data[start:stop] for start, stop in pairwise(bounds))
    ids = [id_and_length(record)[0] for record in records]
    after, before = request.after, reply.end + 1
    if request.HasField("before"):
        before = min(before, request.before)
    through = reply.through if reply.HasField("through") else None
    is_wrong = bounds[-1] != len(data) or (through is not None and not after < through < before)
    if through is not None:
        after, before = (through - 1, before) if request.newest_first else (after, through + 1)
    around = (after, *(ids[::-1] if request.newest_first else ids), before)
    if is_wrong or len(ids) > request.limit or (ids and not all(one < other for one, other in pairwise(around))):
        raise BadFrame(f"{address} answered with other transactions than were asked for")
    for id_, start, stop in zip(ids, bounds, bounds[1:], strict=False):
        if not is_sound_record(data, start, stop, id_):
            raise BadFrame(f"record {id_} from {address} was damaged on the way")
    return MarkedPage(records=records, end=Position(reply.end, timeline), through=through)


LOCATE = _value("Log/Locate", _APPLICATIONS | _LOOKING | _SERVERS, Topology, Audit.LOOK)
REGISTER = _value("Log/Register", _USERS, Registration)
HIGH_WATER_MARK = _call(
    "Log/HighWaterMark", _USERS | _LOOKING,
    lambda found: _position_message(*found), lambda reply, *_: (_position(reply), reply.confirmed), Audit.LOOK,
)  # fmt: skip
FETCH = _call(
    "Log/Fetch", _USERS, run_message, lambda reply, _, address: checked_run(reply, address), Audit.READ,
    _about("first_id={said.first_id}", "partition"),
)  # fmt: skip
FIND_TIME = _call("Log/FindTime", _APPLICATIONS | _LOOKING, _position_message, _position, Audit.LOOK)
HISTORY = _call(
    "Log/History", _USERS, _history_message, _history, Audit.LOOK, _about("lock={said.lock:#018x}", "partition")
)
FETCH_MARKED = _call(
    "Log/FetchMarked", _USERS, _marked_message, _marked, Audit.READ,
    lambda said: ((said.partition,), "locks=" + ",".join(f"{lock:#018x}" for lock in said.locks[:4])),
)  # fmt: skip
MAKE_GROUP = _value("Log/MakeGroup", _APPLICATIONS, MadeGroup, Audit.CHANGE, _about("{said.meta.name}"))
GET_GROUP = _value("Log/GetGroup", _APPLICATIONS | _LOOKING, MadeGroup, Audit.LOOK)
DESCRIBE_GROUP = _value("Log/DescribeGroup", _APPLICATIONS, GroupStatus, Audit.LOOK)
PARKED = _value("Log/Parked", _APPLICATIONS, ParkedList, Audit.LOOK)
REPLAY = _value("Log/Replay", _APPLICATIONS, Changed, Audit.CHANGE, _about("{said.name}", "partition"))
MOUNT: Call[Sequence[ServerFrame]] = _call(
    "Log/Mount", _USERS, server_message, lambda reply, *_: server_frames(reply), Audit.LOOK
)
"""Recorded in the audit log where it is served, because it has a begin and an end."""
ATTEND: Call[Sequence[DeliveryFrame]] = _call(
    "Log/Attend", _APPLICATIONS, delivery_message, lambda reply, *_: delivery_frames(reply), Audit.LOOK
)


# -- a server, for operators -------------------------------------------------------------------------------------------


DESCRIBE_SERVER = _value("ServerAdmin/Describe", _LOOKING | _SERVERS, ServerDescription, Audit.LOOK)
DRAIN = _field(
    "ServerAdmin/Drain", _OPERATORS, "partitions", list[int], Audit.CHANGE,
    lambda said: ((), f"draining={said.draining}".lower()),
)  # fmt: skip
EXPLAIN_LOCK = _value("ServerAdmin/ExplainLock", _LOOKING, LockExplanation, Audit.LOOK)
SERVER_EVENTS = _value("ServerAdmin/Events", _LOOKING, Events, Audit.LOOK)
LIST_CLIENTS = _value("ServerAdmin/ListClients", _LOOKING, ClientList, Audit.LOOK)
DISCONNECT_CLIENT = _field(
    "ServerAdmin/DisconnectClient", _OPERATORS, "mounts", int, Audit.CHANGE,
    lambda said: ((), " ".join(filter(None, (said.name, said.instance)))),
)  # fmt: skip
LIST_GROUPS = _value("ServerAdmin/ListGroups", _LOOKING, GroupList, Audit.LOOK)
LIST_PARKED = _value("ServerAdmin/ListParked", _LOOKING, ParkedList, Audit.LOOK)
SET_GROUP = _value("ServerAdmin/SetGroup", _OPERATORS, MadeGroup, Audit.CHANGE, _about("{said.meta.name}"))
REMOVE_GROUP = _nothing("ServerAdmin/RemoveGroup", _OPERATORS, Audit.CHANGE, _about("{said.name}"))
PASS_ENTRY = _nothing("ServerAdmin/PassEntry", _OPERATORS, Audit.CHANGE, _about("entry={said.id}"))
CHANGE_GROUP = _value(
    "ServerAdmin/ChangeGroup", _OPERATORS, Changed, Audit.CHANGE, _about("{said.name} change={said.change}", "partition")
)
