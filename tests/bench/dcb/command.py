"""`./dev bench dcb`: the event store of Waltz beside others with dynamic consistency boundaries, under the same load.

Clients append events alone, or read a boundary and append on the condition that nothing came between; sixteen of them race
for one boundary. Round after round, the systems take turns; only one of them runs at a time, and each begins empty. What
each kept is compared with what it acknowledged, event by event.
"""

from __future__ import annotations

import argparse

from tests.bench.dcb.load import BOUNDARY_EVENTS, WORKLOADS
from tests.bench.dcb.stores import SYSTEMS
from tests.bench.peers.command import Comparison, carry_out, parser_of


class EventStores(Comparison):
    load = "tests.bench.dcb.load"
    workloads = len(WORKLOADS)
    caveats = (
        "Everything shares this machine's cores and one disk, so replicas are processes and not machines; one Python "
        "process makes the load, and where its own CPU is most of a core it is the client that is compared.",
        f"A boundary has at most {BOUNDARY_EVENTS} events. Ratios are the result; absolute figures are not.",
        "After each measurement every event was read again: each that was acknowledged is there, once, and nothing else. "
        "That they survive a power cut was not tried.",
    )


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of("./dev bench dcb", __doc__, SYSTEMS, sizes=(128,))
    parser.set_defaults(in_flight=0)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    return carry_out(EventStores, parsed(arguments), SYSTEMS)
