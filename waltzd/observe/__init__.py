"""Observability of clients: metrics for Prometheus, spans for OpenTelemetry.

    client = Client("server-1:55180", view=view)
    observe.metrics(client)
    observe.traces(client)
    async with client: ...

Each function takes a `Client` or a `BlockingClient` that is not open yet, and needs an extra: `waltzd[metrics]`,
`waltzd[otel]`. A client without them does no extra work."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, TypeAlias

from waltzd.client.client import Client
from waltzd.errors import BadArgument
from waltzd.errors.operations import not_installed

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

    from waltzd.client.blocking import BlockingClient
    from waltzd.client.instrument import Instrument

__all__ = ["metrics", "traces"]
Observed: TypeAlias = "Client | BlockingClient"


def metrics(client: Observed, *, name: str = "client", registry: CollectorRegistry | None = None) -> None:
    """Register the metrics of a client with Prometheus: outcomes, durations, transactions in flight, and for each partition
    the position of the view, its lag, and whether it fails. docs/how-to/observe.md lists them.

    Args:
        client: A client that is not open yet.
        name: The label `client` of its metrics. Each client of a process needs its own name.
        registry: Where to register; the default of `prometheus_client` if it is not given.

    Raises:
        NotInstalled: `prometheus_client` is missing: `pip install 'waltzd[metrics]'`.
        BadArgument: The client is open, or another client with this name in the registry is not closed.

    Example:
        ```python
        client = Client(servers, view=view)
        observe.metrics(client)
        prometheus_client.start_http_server(9100)
        ```
    """
    inner = _unopened(client)
    _attach(inner, _module("prometheus", "metrics").register_client(inner, name, registry))


def traces(client: Observed, *, tracer_provider: TracerProvider | None = None) -> None:
    """Create OpenTelemetry spans for everything that a client sends and applies.

    `waltz append` lasts from the call to the outcome, as a child of the span of the caller, once for each attempt of a
    submit. `waltz apply` lasts while the view applies a transaction, or several together; spans of its database are
    children. If this client appended the applied transaction, `waltz apply` has a link to `waltz append`. Across processes,
    both have the attributes `waltz.partition` and `waltz.id`, because the 32 bits of a kind have no room for a
    context.

    Args:
        client: A client that is not open yet.
        tracer_provider: Where spans go; the global one of OpenTelemetry if it is not given.

    Raises:
        NotInstalled: `opentelemetry-api` is missing: `pip install 'waltzd[otel]'`.
        BadArgument: The client is open.
    """
    _attach(_unopened(client), _module("opentelemetry", "otel").Spans(tracer_provider))


def _unopened(client: Any) -> Client:
    inner = client if isinstance(client, Client) else getattr(client, "_inner", None)
    if not isinstance(inner, Client):
        raise BadArgument(f"{client!r} is neither a Client nor a BlockingClient")
    if inner.partitions:
        raise BadArgument("the client is open already", next_step="observe it before it is opened")
    return inner


def _attach(client: Client, instrument: Instrument) -> None:
    if instrument not in client._instruments:
        client._instruments.append(instrument)


def _module(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        raise not_installed(error, extra) from error
