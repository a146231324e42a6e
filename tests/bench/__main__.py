"""`./dev bench`: what was measured, as ratios to what this machine can do by itself."""

from __future__ import annotations

import sys

from tests.bench import archive, curves, failover, formats, groups, idle, keys, moves, spark, storage, tool, views
from tests.bench.dcb import command as dcb
from tests.bench.peers import command as peers
from tests.bench.peers import groups as groups_nats

BENCHES = {
    "archive": archive.main,
    "curves": curves.main,
    "dcb": dcb.main,
    "failover": failover.main,
    "formats": formats.main,
    "groups": groups.main,
    "groups-nats": groups_nats.main,
    "idle": idle.main,
    "keys": keys.main,
    "moves": moves.main,
    "peers": peers.main,
    "spark": spark.main,
    "storage": storage.main,
    "tool": tool.main,
    "views": views.main,
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHES:
        print(f"usage: ./dev bench {{{','.join(BENCHES)}}} [options]", file=sys.stderr)
        return 2
    return BENCHES[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
