"""`waltzctl doctor`: what will go wrong next, with the cure. The rules are in `waltzctl.watching.diagnosis`."""

from __future__ import annotations

from waltzctl.options import Timeout
from waltzctl.reach import Meant, Reach
from waltzctl.show.forms import AnyForm, put
from waltzctl.show.watching import checks
from waltzctl.watching.diagnosis import Check, Grade, diagnose
from waltzctl.watching.examination import examine
from waltzctl.watching.poll import CALL_SECONDS, Poll
from waltzd.client import loop
from waltzd.errors import EXIT_OK, EXIT_UNHEALTHY


def doctor(*, seconds: Timeout = CALL_SECONDS, reach: Meant, output: AnyForm = "table") -> int:
    """Check a cluster for what will go wrong next: disks, space, clocks, open files, certificates, versions, how many
    replicas may fail, lag, failure domains, ZooKeeper, and work that somebody forgot. Nothing is changed.

    Each check is PASS, WARN, FAIL, or UNKNOWN where it could not be made. The end is 10 when one FAILs, else 0.

    \b
    Examples:
      waltzctl doctor
      waltzctl doctor --timeout 10 -o json
    """
    found = loop.run(_checks(reach, seconds))
    put(checks(found), output)
    return EXIT_UNHEALTHY if any(check.grade is Grade.FAIL for check in found) else EXIT_OK


async def _checks(reach: Reach, seconds: float) -> list[Check]:
    async with Poll(reach, seconds=seconds, aloud=True) as poll:
        return diagnose(await examine(reach, await poll.look(), seconds=seconds))
