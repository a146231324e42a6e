"""Instruments of a client: they are called with everything that it sends and applies. `waltzd.observe` makes them.

A client without instruments only checks an empty list in each call. An instrument is called once for a call: once for
an `append_many` of a thousand transactions, and once for a thousand transactions that are applied together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from waltzd.client.follower import Call, Follower
from waltzd.client.pending import AnyRequest
from waltzd.client.view import Transaction

if TYPE_CHECKING:
    from waltzd.protocol.groups import AckKind


class Instrument(Protocol):
    def sent(self, partition: int, request: AnyRequest, outcome: asyncio.Future[Any]) -> None:
        """Note a request, in the call of its sender. `outcome` is settled with its outcome."""

    def again(self, partition: int) -> None:
        """Note that a submit was rejected and is about to build its transaction again."""

    def calling(self, partition: int, call: Call) -> Call:
        """Return a function that calls the functions of the view, in place of `call`, when the partition is activated."""

    def delivered(self, group: str, partition: int, count: int) -> None:
        """Note that a subscription hands out deliveries."""

    def settled(self, group: str, partition: int, verb: AckKind, count: int) -> None:
        """Note that the owner has received an acknowledgement."""


Instruments: TypeAlias = Sequence[Instrument]


def handed_on(function: Callable[..., Any], arguments: Sequence[Any]) -> Sequence[Transaction]:
    """Return the transactions that this call of the view applies; an empty list for other calls."""
    if len(arguments) != 1 or isinstance(getattr(function, "__self__", None), Follower):
        return ()
    (given,) = arguments
    if isinstance(given, Transaction):
        return (given,)
    return given if isinstance(given, list) and given and isinstance(given[0], Transaction) else ()
