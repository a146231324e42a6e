"""Recording calls in the audit log of a daemon, as their declarations say.

A call that is not declared is recorded without its arguments. Mounts and append streams are recorded where they are
served, because they have a begin and an end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from waltzd.errors import WaltzError
from waltzd.protocol.audit import ANONYMOUS, Auditor, AuditRecord, shortened, spans
from waltzd.protocol.role import Identity, Role
from waltzd.wire.calls import CALLS, OPEN, RIGHTS_OF_TOOLS, About, Audit
from waltzd.wire.grpc import caller_of, peer_of


class Heard:
    """Request and reply of a call while it runs."""

    request: Any = None
    reply: Any = None
    code: str | None = None
    """Code of the error that it ended with; None if there was none."""
    is_denied = False
    """Whether it was denied for lack of a right, which is always recorded."""


def name_of(identity: Identity | None) -> str:
    return ANONYMOUS if identity is None else identity.uri


@contextmanager
def noted(auditor: Auditor, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[Heard]:
    """Record the call of gRPC that runs inside when it has ended, whatever its result."""
    # Who calls is asked before the call runs: of one that has ended gRPC knows it no more, and ends the process.
    with note(auditor, method, caller=caller_of(context), peer=peer_of(context)) as heard:
        try:
            yield heard
        except grpc.aio.AbortError:
            heard.code = (context.details() or "").partition(" ")[0]  # `abort` writes the code first
            raise
        finally:
            heard.is_denied = context.code() is grpc.StatusCode.PERMISSION_DENIED


@contextmanager
def note(auditor: Auditor, method: str, *, caller: Identity | None, peer: str) -> Iterator[Heard]:
    """Record the call that runs inside when it has ended, whatever its result."""
    heard, is_gone = Heard(), False
    try:
        yield heard
    except asyncio.CancelledError:
        is_gone = True
        raise
    except WaltzError as error:
        heard.code, heard.is_denied = error.code, error.status == grpc.StatusCode.PERMISSION_DENIED.name
        raise
    except Exception:
        if heard.code is None:
            heard.code = WaltzError.code  # a mistake of ours
        raise
    finally:
        request = heard.request if isinstance(heard.request, Message) else None
        if heard.is_denied or _is_worth_a_line(method, request, caller):
            partitions, about = _about(method, request)
            code, partitions = _refused_in(heard.reply, heard.code, partitions)
            auditor.note(
                AuditRecord(
                    who=name_of(caller),
                    peer=peer,
                    what=method.removeprefix("/waltz.v1.").removeprefix("/"),
                    partitions=spans(partitions),
                    about=shortened(f"{about} caller=gone".strip() if is_gone else about),
                    code=code,
                )
            )


def _is_worth_a_line(method: str, request: Any, caller: Identity | None) -> bool:
    audit = Audit.LOOK if method in RIGHTS_OF_TOOLS else CALLS[method].audit if method in CALLS else Audit.CHANGE
    if audit is not Audit.CHANGE:
        return audit is Audit.READ and caller is not None and caller.role is Role.OPERATOR
    # Without a session a replica is only asked where it stands.
    return method != OPEN.path or request is None or bool(request.target.HasField("session"))


def _about(method: str, request: Any) -> About:
    return ((), "") if method not in CALLS or request is None else CALLS[method].about(request)


def _refused_in(reply: Any, code: str | None, partitions: Iterable[int]) -> tuple[str | None, Iterable[int]]:
    """Return the partitions that were refused and the code of the first refusal, if the reply has a result for each
    partition. Else return what was given."""
    refused = [one for one in getattr(reply, "results", ()) if one.HasField("error")]
    return (refused[0].error.code, [one.partition for one in refused]) if refused else (code, partitions)
