"""The standard gRPC health service and server reflection, on the existing ports of a daemon.

The health is the result of `waltzd.daemon.readiness`, cached for a quarter of a second. The service for operators is
healthy while the process lives; all other names, and the empty one, are healthy if the daemon is ready. Reflection lists
the calls for tools like `grpcurl`. Both services are subject to the roles of callers (`waltzd.protocol.role`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from waltzd.daemon.readiness import Unready
from waltzd.errors import WaltzError
from waltzd.errors.operations import Draining, TooManyCallers
from waltzd.wire.grpc import Server, abort

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
WATCH_SECONDS = 1.0
"""Interval at which the health is checked for a caller that watches it."""
FRESH_SECONDS = 0.25
"""Seconds for which a result is cached."""
WATCHERS_MAX = 64
HEALTH = "grpc.health.v1.Health"


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    def __init__(self, services: Mapping[str, bool], unready: Unready, is_ending: Callable[[], bool]) -> None:
        """`services`: those of this port, and whether each has the health of the daemon. `is_ending` ends all watchers."""
        self._services = {"": True, HEALTH: False, **services}
        self._unready = unready
        self._is_ending = is_ending
        self._watchers = 0
        self._one_at_a_time = asyncio.Lock()
        self._is_ready = False
        self._looked: float | None = None
        """Time at which `_is_ready` was computed; None before the first time."""

    async def _look(self) -> bool:
        async with self._one_at_a_time:
            now = asyncio.get_running_loop().time()
            if self._looked is None or now - self._looked >= FRESH_SECONDS:
                self._is_ready = not await self._unready()
                self._looked = now
            return self._is_ready

    async def _status(self, service: str) -> Any:
        """Return the health of a service; None if it is not on this port."""
        depends = self._services.get(service)
        if depends is None:
            return None
        is_well = not depends or await self._look()
        answer = health_pb2.HealthCheckResponse
        return answer.SERVING if is_well else answer.NOT_SERVING

    async def Check(self, request: Any, context: Context) -> Any:
        try:
            status = await self._status(request.service)
        except WaltzError as error:
            await abort(context, error)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r} at this port")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Context) -> AsyncIterator[Any]:
        if self._watchers >= WATCHERS_MAX:
            await abort(context, TooManyCallers(f"{WATCHERS_MAX} callers watch the health of this process already"))
        self._watchers += 1
        try:
            told = None
            while not self._is_ending():
                status = await self._status(request.service)
                if status is None:
                    status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                if status != told:
                    yield health_pb2.HealthCheckResponse(status=status)
                    told = status
                await asyncio.sleep(WATCH_SECONDS)
            raise Draining("the process is shutting down")
        except WaltzError as error:
            await abort(context, error)
        finally:
            self._watchers -= 1


def add_health(
    server: Server, services: Mapping[str, bool], unready: Unready, *, is_ending: Callable[[], bool] = lambda: False
) -> None:
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(services, unready, is_ending), server)


def add_reflection(server: Server, services: Sequence[str]) -> None:
    reflection.enable_server_reflection((*services, HEALTH, reflection.SERVICE_NAME), server)
