"""OpenTelemetry spans of a client. Only the API package is needed; the application configures where spans go.

An append runs in the context of its caller. The view is called by a task of the client, which has no caller, so its span is
a root, with links to the spans in which this client appended the same transactions."""

from __future__ import annotations

import asyncio
import contextvars
from collections import OrderedDict
from functools import partial
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TracerProvider

from waltzd.client.follower import Call
from waltzd.client.instrument import handed_on
from waltzd.client.pending import AnyRequest, Outcomes
from waltzd.protocol.groups import AckKind
from waltzd.protocol.locks import Committed, Rejected

REMEMBERED = 10_000
"""Number of committed transactions whose append span is remembered for a link. The oldest are dropped first."""
Attributes = dict[str, str | int]


class Spans:
    def __init__(self, provider: TracerProvider | None) -> None:
        self._tracer = trace.get_tracer("waltzd", tracer_provider=provider)
        self._made: OrderedDict[tuple[int, int], SpanContext] = OrderedDict()
        """Append span by partition and id. It stays empty in a client without a view, which would never remove one."""
        self._has_view = False

    def sent(self, partition: int, request: AnyRequest, outcome: asyncio.Future[Any]) -> None:
        about: Attributes = {"waltz.partition": partition, "waltz.transactions": request.rows}
        span = self._tracer.start_span("waltz append", kind=SpanKind.PRODUCER, attributes=about)
        outcome.add_done_callback(partial(self._decided, span, partition))

    def _decided(self, span: Span, partition: int, outcome: asyncio.Future[Any]) -> None:
        if outcome.cancelled():
            span.set_attribute("waltz.outcome", "cancelled")
        elif (error := outcome.exception()) is not None:
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        else:
            found = outcome.result()
            span.set_attributes(_about(found))
            if isinstance(found, Committed) and self._has_view and span.is_recording():
                for number in range(found.count):
                    self._made[partition, found.id + number] = span.get_span_context()
                while len(self._made) > REMEMBERED:
                    self._made.popitem(last=False)
        span.end()

    def again(self, partition: int) -> None:
        """Do nothing: each attempt has a span of its own."""

    def delivered(self, group: str, partition: int, count: int) -> None:
        """Do nothing: consumer groups have no spans."""

    def settled(self, group: str, partition: int, verb: AckKind, count: int) -> None:
        """Do nothing: acknowledgements have no spans."""

    def calling(self, partition: int, call: Call) -> Call:
        self._has_view = True

        async def traced(function: Any, *arguments: Any) -> Any:
            given = handed_on(function, arguments)
            if not given:
                return await call(function, *arguments)
            about: Attributes = {"waltz.partition": partition, "waltz.id": given[0].id, "waltz.transactions": len(given)}
            links = []
            if self._made:
                made = (self._made.pop((partition, transaction.id), None) for transaction in given)
                links = [Link(context) for context in made if context is not None]
            with self._tracer.start_as_current_span("waltz apply", kind=SpanKind.CONSUMER, attributes=about, links=links):
                # In a copy of this context, so that the span is current even if the view runs on another thread.
                return await call(partial(contextvars.copy_context().run, function), *arguments)

        return traced


def _about(found: Any) -> Attributes:
    if isinstance(found, Outcomes):
        return {
            "waltz.outcome": "committed" if found.committed == len(found) else "some",
            "waltz.committed": found.committed,
        }
    if isinstance(found, Committed):
        return {"waltz.outcome": "committed", "waltz.id": found.id}
    if isinstance(found, Rejected):
        return {
            "waltz.outcome": "rejected",
            "waltz.reason": found.reason.name.lower(),
            "waltz.conflict_id": found.conflict_id,
        }
    return {"waltz.outcome": "unknown"}
