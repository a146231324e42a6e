"""Which gRPC calls stand in the audit log of a daemon, and what of their messages: never a payload, a token or a secret.

A call that is in neither table here is noted, without its arguments: a new one is rather told of than forgotten. Mounts and
append streams are noted where they are served: they have a begin and an end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from waltzd.errors import WaltzError
from waltzd.protocol.audit import ANONYMOUS, Auditor, Deed, shortened, spans
from waltzd.protocol.role import Identity, Role
from waltzd.wire.grpc import caller_of, peer_of

LOOKING = frozenset(
    {
        "/waltz.v1.Replica/Quiet",
        "/waltz.v1.Replica/ReadLocks",
        "/waltz.v1.Replica/FindTime",
        "/waltz.v1.Replica/ListSegments",
        "/waltz.v1.StorageAdmin/Describe",
        "/waltz.v1.StorageAdmin/Digest",
        "/waltz.v1.StorageAdmin/Events",
        "/waltz.v1.Log/Locate",
        "/waltz.v1.Log/Mount",
        "/waltz.v1.Log/HighWaterMark",
        "/waltz.v1.Log/FindTime",
        "/waltz.v1.ServerAdmin/Describe",
        "/waltz.v1.ServerAdmin/ExplainLock",
        "/waltz.v1.ServerAdmin/Events",
        "/waltz.v1.Log/Attend",
        "/waltz.v1.Log/GetGroup",
        "/waltz.v1.ServerAdmin/ListClients",
        "/waltz.v1.ServerAdmin/ListGroups",
        "/waltz.v1.ServerAdmin/ListParked",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    }
)
"""Noted only where the caller had no right to it."""
READING = frozenset({"/waltz.v1.Replica/Read", "/waltz.v1.Log/Fetch"})
"""Noted where an operator reads payloads: to servers and applications it is daily work."""

_About = tuple[Iterable[int], str]


def _marked(said: Any) -> _About:
    return [said.target.partition], f"session={said.target.session} mark={said.mark}"


ARGUMENTS: dict[str, Callable[[Any], _About]] = {
    "/waltz.v1.Replica/Open": lambda said: (
        [said.target.partition], f"session={said.target.session}{' create=true' if said.create else ''}"
    ),
    "/waltz.v1.Replica/SetLowMark": _marked,
    "/waltz.v1.Replica/Truncate": _marked,
    "/waltz.v1.Replica/Read": lambda said: ([said.target.partition], f"first_id={said.first_id}"),
    "/waltz.v1.Replica/Archive": lambda said: ([said.target.partition], f"last_id={said.known.last_id}"),
    "/waltz.v1.Replica/Fork": lambda said: (
        [said.target.partition], f"timelines={len(said.timelines)}"
    ),
    "/waltz.v1.Replica/Trim": _marked,
    "/waltz.v1.Replica/BackUp": lambda said: ([said.target.partition], f"committed={said.committed}"),
    "/waltz.v1.Replica/SaveMetadata": lambda said: ([], f"bytes={len(said.text)}"),
    "/waltz.v1.Replica/CheckArchive": lambda said: ([said.target.partition], f"first_id={said.first_id}"),
    "/waltz.v1.StorageAdmin/CreatePartitions": lambda said: (said.partitions, ""),
    "/waltz.v1.StorageAdmin/RemovePartitions": lambda said: (
        said.partitions, f"files={'deleted' if said.delete_files else 'set-aside'}"
    ),
    "/waltz.v1.StorageAdmin/SetAvailable": lambda said: (said.partitions, f"available={said.available}".lower()),
    "/waltz.v1.StorageAdmin/Verify": lambda said: (said.partitions, ""),
    "/waltz.v1.StorageAdmin/Fence": lambda said: ([said.partition], f"session={said.session}"),
    "/waltz.v1.StorageAdmin/Restore": lambda said: (
        [said.order.partition], f"mark={said.order.mark} session={said.order.session}"
    ),
    "/waltz.v1.StorageAdmin/DeleteSetAside": lambda said: ([], f"names={','.join(said.names)}"),
    "/waltz.v1.Log/Fetch": lambda said: ([said.partition], f"first_id={said.first_id}"),
    "/waltz.v1.Log/MakeGroup": lambda said: ([], said.meta.name),
    "/waltz.v1.ServerAdmin/SetGroup": lambda said: ([], said.meta.name),
    "/waltz.v1.ServerAdmin/RemoveGroup": lambda said: ([], said.name),
    "/waltz.v1.ServerAdmin/PassEntry": lambda said: ([], f"entry={said.id}"),
    "/waltz.v1.ServerAdmin/ChangeGroup": lambda said: ([said.partition], f"{said.name} change={said.change}"),
    "/waltz.v1.ServerAdmin/DisconnectClient": lambda said: ([], " ".join(filter(None, (said.name, said.instance)))),
    "/waltz.v1.ServerAdmin/Drain": lambda said: ([], f"draining={said.draining}".lower()),
}  # fmt: skip


class Heard:
    """What is known of one call while it runs."""

    request: Any = None
    reply: Any = None


def name_of(identity: Identity | None) -> str:
    return ANONYMOUS if identity is None else identity.uri


@contextmanager
def noted(auditor: Auditor, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[Heard]:
    """Notes the call that runs inside, when it has ended, however it ended."""
    # Who calls is asked before the call runs: of one that has ended gRPC knows it no more, and ends the process.
    caller, peer = caller_of(context), peer_of(context)
    heard, code, is_gone = Heard(), None, False
    try:
        yield heard
    except grpc.aio.AbortError:
        code = (context.details() or "").partition(" ")[0]  # as `abort` writes it
        raise
    except asyncio.CancelledError:
        is_gone = True
        raise
    except Exception:
        code = WaltzError.code  # a mistake of ours
        raise
    finally:
        is_denied = context.code() is grpc.StatusCode.PERMISSION_DENIED
        request = heard.request if isinstance(heard.request, Message) else None
        if is_denied or _is_worth_a_line(method, request, caller):
            partitions, about = _about(method, request)
            code, partitions = _refused_in(heard.reply, code, partitions)
            auditor.note(
                Deed(
                    who=name_of(caller),
                    peer=peer,
                    what=method.removeprefix("/waltz.v1.").removeprefix("/"),
                    partitions=spans(partitions),
                    about=shortened(f"{about} caller=gone".strip() if is_gone else about),
                    code=code,
                )
            )


def _is_worth_a_line(method: str, request: Any, caller: Identity | None) -> bool:
    if method in LOOKING:
        return False
    if method in READING:
        return caller is not None and caller.role is Role.OPERATOR
    # Without a session a replica is only asked where it stands.
    return method != "/waltz.v1.Replica/Open" or request is None or bool(request.target.HasField("session"))


def _about(method: str, request: Any) -> _About:
    said = ARGUMENTS.get(method)
    return ((), "") if said is None or request is None else said(request)


def _refused_in(reply: Any, code: str | None, partitions: Iterable[int]) -> tuple[str | None, Iterable[int]]:
    """Where each partition has a result of its own: those that were refused, and why the first of them was."""
    refused = [one for one in getattr(reply, "results", ()) if one.HasField("error")]
    return (refused[0].error.code, [one.partition for one in refused]) if refused else (code, partitions)
