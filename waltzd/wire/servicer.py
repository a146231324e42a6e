"""The answering side of gRPC calls: each call of a service is a method of its host with the same name.

A method takes the request and its origin, and returns the plain value of the reply or yields values. An error becomes
the status of the call. Within one process a `Transport` asks a host in the same way, without making bytes of messages.

Calls are recorded in the audit log of the daemon as their declarations say.

A call that is not declared is recorded without its arguments. Mounts and append streams are recorded where they are
served, because they have a begin and an end.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar
from uuid import UUID

import grpc
import grpc.aio
from google.protobuf.message import Message

from waltzd.errors import CannotConnect, WaltzError
from waltzd.protocol.audit import ANONYMOUS, Auditor, AuditRecord, shortened, spans
from waltzd.protocol.role import Identity, Role
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.calls import CALLS, OPEN, RIGHTS_OF_TOOLS, About, Audit, Call
from waltzd.wire.codec import key_of, uuid_of
from waltzd.wire.grpc import INSTANCE_KEY, STORAGE_KEY, Server, abort, caller_of, peer_of


class Heard:
    """Request and reply of a call while it runs."""

    request: Any = None
    reply: Any = None
    code: str | None = None
    """Code of the error that it ended with; None if there was none."""
    is_denied = False
    """Whether it was denied for lack of a right, which is always recorded."""


def audited_name(identity: Identity | None) -> str:
    return ANONYMOUS if identity is None else identity.uri


@contextmanager
def audited_grpc(auditor: Auditor, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[Heard]:
    """Record the call of gRPC that runs inside when it has ended, whatever its result."""
    # Who calls is asked before the call runs: of one that has ended gRPC knows it no more, and ends the process.
    with audited(auditor, method, caller=caller_of(context), peer=peer_of(context)) as heard:
        try:
            yield heard
        except grpc.aio.AbortError:
            heard.code = (context.details() or "").partition(" ")[0]  # `abort` writes the code first
            raise
        finally:
            heard.is_denied = context.code() is grpc.StatusCode.PERMISSION_DENIED


@contextmanager
def audited(auditor: Auditor, method: str, *, caller: Identity | None, peer: str) -> Iterator[Heard]:
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
                    who=audited_name(caller),
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


R = TypeVar("R")
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class Origin:
    """Caller of a call, and the storage that it means."""

    identity: Identity | None = None
    """Identity in the caller's certificate; None without one."""
    storage: str = ""
    """Name of the storage that the call is for; empty if the call names none."""
    instance: UUID | None = None
    """Process of the storage that the call is for; None if the call names none."""
    sent: ExitStack | None = None
    """What is returned once the answer has been sent or the call has ended; None where an answer is handed over at once."""

    @property
    def uri(self) -> str:
        return "" if self.identity is None else self.identity.uri

    @staticmethod
    def of(context: Context, sent: ExitStack | None = None) -> Origin:
        said = dict(context.invocation_metadata() or ())
        name, instance = said.get(STORAGE_KEY, b""), said.get(INSTANCE_KEY)
        assert isinstance(name, bytes)
        assert isinstance(instance, bytes | None)
        return Origin(
            caller_of(context),
            name.decode("utf-8", "replace"),
            None if instance is None else uuid_of(instance, "an instance"),
            sent,
        )


class Host:
    """A service, with a method for each call."""

    def admit(self, key: UUID | None, origin: Origin) -> None:
        """Refuse a call that is meant for another cluster or process, before anything else is checked. `key` is the
        cluster in the request; None if its message has no field for one."""

    def refused(self) -> None:
        """Count a refused call."""


def answered(host: Host, call: Call[R], request: Any, origin: Origin) -> Any:
    """Ask a host. Return an awaitable of the value, or an asynchronous generator of values. Raise if the host refuses
    the call."""
    fields = call.request.DESCRIPTOR.fields_by_name
    named = request.cluster_key if "cluster_key" in fields else request.target.cluster_key if "target" in fields else None
    host.admit(None if named is None else key_of(named), origin)
    return getattr(host, call.name)(request, origin)


def add_service(server: Server, name: str, host: Host) -> None:
    """Serve all calls of a service. A call that `calls` does not declare is a KeyError, so the daemon does not start."""
    service = wire.DESCRIPTOR.services_by_name[name]
    handlers = {}
    for method in service.methods:
        call = CALLS[f"/{service.full_name}/{method.name}"]
        serve = getattr(host, call.name)
        if method.client_streaming:
            make, behaviour = grpc.stream_stream_rpc_method_handler, serve
        elif inspect.isasyncgenfunction(serve):
            make, behaviour = grpc.unary_stream_rpc_method_handler, _streaming(host, call)
        else:
            make, behaviour = grpc.unary_unary_rpc_method_handler, _answering(host, call)
        handlers[method.name] = make(
            behaviour,
            request_deserializer=call.request.FromString,
            response_serializer=call.reply.SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def _answering(host: Host, call: Call[R]) -> Any:
    async def answer(request: Any, context: Context) -> Any:
        sent = ExitStack()
        context.add_done_callback(lambda _: sent.close())  # type: ignore[arg-type]
        try:
            return call.pack(await answered(host, call, request, Origin.of(context, sent)))
        except WaltzError as error:
            host.refused()
            await abort(context, error)
        finally:
            if context.done():
                sent.close()

    return answer


def _streaming(host: Host, call: Call[R]) -> Any:
    # gRPC takes a coroutine that writes to the context as well as an iterator. A coroutine is ended with the call, whatever
    # it waits for; an iterator could be left lying about.
    async def answer(request: Any, context: Context) -> None:
        try:
            values: AsyncGenerator[Any, None] = answered(host, call, request, Origin.of(context))
            async with aclosing(values):
                async for value in values:
                    await write(context, call.pack(value))
        except WaltzError as error:
            if not context.done():
                host.refused()
            await abort_stream(context, error)

    return answer


async def write(context: Context, message: Any) -> None:
    try:
        await context.write(message)
    except grpc.aio.BaseError as error:
        raise CannotConnect(f"{peer_of(context)} has disconnected") from error


async def abort_stream(context: Context, error: WaltzError) -> None:
    if context.done():  # the caller has gone
        return
    with suppress(grpc.aio.InternalError, grpc.aio.UsageError):  # it goes at this moment
        await abort(context, error)
