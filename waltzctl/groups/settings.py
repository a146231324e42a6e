"""Options with the settings of a consumer group: durations, pauses, kinds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from typer import Option

from waltzctl.shell.options import option_group
from waltzd.cluster.groups import BACK_OFF_MAX, KINDS_MAX, MS_MAX
from waltzd.errors import BadArgument
from waltzd.protocol.groups import Exhausted

ALL = "all"
_DURATION = re.compile(r"([0-9]{1,9})(ms|s|m|h)")
_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_KIND = re.compile(r"-?[0-9]{1,10}")


@option_group
@dataclass(frozen=True, kw_only=True)
class GroupSettingOptions:
    """Settings that can be changed while a group exists; None for an option that was not used."""

    ack_wait: Annotated[
        str | None,
        Option("--ack-wait", metavar="DURATION", help="Time a member has to acknowledge a delivery (30s by default)."),
    ] = None
    max_in_flight: Annotated[
        int | None,
        Option("--max-in-flight", min=1, max=100_000, help="Maximum deliveries in flight to each member (100 by default)."),
    ] = None
    tries: Annotated[
        int | None, Option("--tries", min=1, max=1000, help="Maximum deliveries of a transaction (5 by default).")
    ] = None
    back_off: Annotated[
        str | None,
        Option("--back-off", metavar="DURATION,...", help="Pauses before each retry (1s,5s,30s by default), or none."),
    ] = None
    then: Annotated[
        Literal["park", "stop"] | None,
        Option("--then", help="After the last try: park the transaction (the default), or stop."),
    ] = None
    kinds: Annotated[
        str | None,
        Option("--kinds", metavar="N,...", help="Deliver only transactions of these kinds (all by default)."),
    ] = None

    def changes(self) -> Mapping[str, Any]:
        """Return the settings that were given, by the fields of `GroupMeta`."""
        found = {
            "ack_wait_ms": None if self.ack_wait is None else max(1, milliseconds(self.ack_wait, "--ack-wait")),
            "max_in_flight": self.max_in_flight,
            "deliver_max": self.tries,
            "back_off_ms": None if self.back_off is None else _pauses(self.back_off),
            "exhausted": None if self.then is None else Exhausted(self.then),
            "kinds": None if self.kinds is None else _kinds(self.kinds),
        }
        return {name: value for name, value in found.items() if value is not None}


def milliseconds(text: str, option: str) -> int:
    found = _DURATION.fullmatch(text.strip())
    length = -1 if found is None else int(found[1]) * _UNITS[found[2]]
    if not 0 <= length <= MS_MAX:
        raise BadArgument(
            f"{option} {text}: this is not a duration of at most a day",
            not_done="nothing was changed",
            next_step="write it as 500ms, 30s, 5m or 1h",
        )
    return length


def _pauses(text: str) -> tuple[int, ...]:
    pauses = () if text == "none" else tuple(milliseconds(part, "--back-off") for part in text.split(","))
    if len(pauses) > BACK_OFF_MAX:
        raise BadArgument(f"--back-off: at most {BACK_OFF_MAX} pauses", not_done="nothing was changed")
    return pauses


def _kinds(text: str) -> tuple[int, ...]:
    parts = [] if text == ALL else [part.strip() for part in text.split(",")]
    if not all(_KIND.fullmatch(part) and -(1 << 31) <= int(part) < 1 << 31 for part in parts):
        raise BadArgument(
            f"--kinds {text}: these are no kinds",
            not_done="nothing was changed",
            next_step="write whole numbers of 32 bits, as 1,2,5, or `all`",
        )
    if len(parts) > KINDS_MAX:
        raise BadArgument(f"--kinds: at most {KINDS_MAX} of them", not_done="nothing was changed")
    return tuple(sorted({int(part) for part in parts}))
