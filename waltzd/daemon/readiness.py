"""The reasons why a daemon is not ready; a daemon without a reason is ready. Pure.

A process that responds is alive, even if it is not ready: restarting it because a disk is full or ZooKeeper does not answer
would not help. The same reasons are reported by `/readyz`, the gRPC health service and the metrics.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from waltzd.protocol.descriptions import ServerDescription

Unready: TypeAlias = Callable[[], Awaitable[Sequence[str]]]
"""Function that returns the current reasons of a daemon."""


def of_server(found: ServerDescription, *, is_announced: bool) -> list[str]:
    reasons = []
    if not found.is_connected:
        reasons.append("the coordinator does not answer: what is owned goes on, nothing new is begun")
    if not is_announced:
        reasons.append("it is not in the list of servers yet, so applications do not find it")
    for owned in found.partitions:
        if owned.step != "OPEN":
            reasons.append(
                f"partition {owned.partition} is not open ({owned.step}): {owned.waiting or 'it is being opened'}"
            )
    return reasons


def of_policy(why_closed: str | None) -> list[str]:
    """Return the reason if no application is admitted; `why_closed` is None if the policy is valid or missing."""
    return [] if why_closed is None else [f"it lets only operators in: {why_closed}"]


def of_certificate(seconds_left: float | None) -> list[str]:
    """Return the reason if the certificate has ended; `seconds_left` is None without a certificate."""
    if seconds_left is None or seconds_left >= 0:
        return []
    return ["its certificate is over: new connections fail until another one is in its place"]


def of_storage(
    *, is_draining: bool, free_bytes: int, free_bytes_min: int, full: Sequence[int], refused: Mapping[int, str]
) -> list[str]:
    """Return the reasons of a storage. `full`: partitions without space for appends; `refused`: those with unusable
    files."""
    reasons = []
    if is_draining:
        reasons.append("it is shutting down")
    if free_bytes < free_bytes_min:
        reasons.append(f"the disk is full: {free_bytes} bytes are free, free_bytes_min is {free_bytes_min}; appends wait")
    elif full:
        reasons.append(f"the disk was full: appends of partitions {', '.join(map(str, full))} wait for more space")
    reasons += [f"partition {number} is refused: {why}" for number, why in sorted(refused.items())]
    return reasons
