"""`waltzctl health`: commits a probe in each partition and reads it back, with the milliseconds of each stage."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from waltzctl.health.poll import Poll
from waltzctl.health.probe import Probing, connecting, probe_all
from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget, check_operator
from waltzctl.shell.numbers import chosen
from waltzctl.show import activity
from waltzctl.show.forms import AnyForm, put
from waltzd.client import loop
from waltzd.errors import NoSuchPartition, WaltzError
from waltzd.errors.exit_codes import EXIT_OK, EXIT_UNHEALTHY

SECONDS = 5.0


def health(
    *,
    partitions: Annotated[tuple[str, ...], Argument(metavar="[PARTITION]...")] = (),
    no_write: Annotated[bool, Option("--no-write", help="Only ask each owner whether it is open; write nothing.")] = False,
    seconds: Annotated[
        float, Option("--timeout", min=0.1, max=300, metavar="SECONDS", help="How long each stage may take.")
    ] = SECONDS,
    target: CommandTarget,
    output: AnyForm = "table",
) -> int:
    """Commit a probe in every partition, or in those that are given (0-3,7 or a channel), read it back, and show the
    duration of each stage. Exit code 0 if all probes succeeded, else 10.

    This writes to the log permanently: one transaction of 18 bytes for each partition, without locks. Its kind
    0x57414c5a is reserved for probes, and no application is fed it. With --no-write nothing is written, and only the
    answers of the owners are checked.

    \b
    Examples:
      waltzctl health
      waltzctl health 0-1 --no-write -o json
    """
    if not no_write:
        check_operator(target.tls, "commit a probe; --no-write does not need to")
    wanted = [number for text in partitions for number in chosen(target, text)]
    probing, contact_ms, contact_error = loop.run(_probe(target, wanted, seconds=seconds, is_writing=not no_write))
    put(activity.probing(probing, contact_ms, contact_error, is_writing=not no_write), output)
    return EXIT_OK if probing.is_well and contact_error is None else EXIT_UNHEALTHY


async def _probe(
    target: ClusterTarget, wanted: list[int], *, seconds: float, is_writing: bool
) -> tuple[Probing, float | None, WaltzError | None]:
    """Probe the partitions. Return the results, the milliseconds of a read in ZooKeeper, and the error if it did not
    answer."""
    async with Poll(target, seconds=seconds, aloud=True) as poll:
        report = await poll.report()
        contact_ms = report.facts.coordinator_ms
        found = report.snapshot
        for number in wanted:
            if number >= found.meta.partitions:
                raise NoSuchPartition(
                    f"there is no partition {number}; the cluster has {found.meta.partitions}, from 0 on",
                    not_done="nothing was written",
                )
        numbers = sorted(set(wanted)) or range(found.meta.partitions)
        connect = connecting(target.tls, seconds)
        probing = await probe_all(found, numbers, connect, seconds=seconds, is_writing=is_writing)
    return probing, contact_ms, report.lost.cause if report.lost is not None else None
