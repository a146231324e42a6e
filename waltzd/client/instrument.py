"""Instruments of a client: what is told of everything that it sends and applies. `waltzd.observe` makes them.

A client without instruments pays for each call one look at an empty list. An instrument is told of calls: of a thousand
transactions in one `append_many` once, and of a thousand that are applied together once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from waltzd.client.follower import Call, Follower
from waltzd.client.pending import AnyRequest
from waltzd.client.view import Transaction
from waltzd.protocol.groups import AckKind


class Instrument(Protocol):
    def sent(self, partition: int, request: AnyRequest, outcome: asyncio.Future[Any]) -> None:
        """Something is handed in, in the command of its caller. `outcome` is settled with what became of it."""

    def again(self, partition: int) -> None:
        """What a submit sent was rejected, and is about to be built anew."""

    def calling(self, partition: int, call: Call) -> Call:
        """How the functions of the view are called, instead of `call`. Asked when the partition is activated."""

    def delivered(self, group: str, partition: int, count: int) -> None:
        """A subscription hands out what a consumer group has given it."""

    def settled(self, group: str, partition: int, verb: AckKind, count: int) -> None:
        """The owner has heard what became of that."""


Instruments: TypeAlias = Sequence[Instrument]


def handed_on(function: Callable[..., Any], arguments: Sequence[Any]) -> Sequence[Transaction]:
    """What the view is to apply by this call; nothing, when it is asked for something else."""
    if len(arguments) != 1 or isinstance(getattr(function, "__self__", None), Follower):
        return ()
    (given,) = arguments
    if isinstance(given, Transaction):
        return (given,)
    return given if isinstance(given, list) and given and isinstance(given[0], Transaction) else ()
