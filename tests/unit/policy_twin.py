"""What grants allow, read one by one and aloud: the slow twin of `waltzd.protocol.policy`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from waltzd.protocol.policy import Grant, Verb


def allows(grants: Sequence[Grant], name: str, verb: Verb, partition: int, lock: str | None = None) -> bool:
    """Whether any of them does; `lock`: the name of one under which is appended."""

    def speaks_of(pattern: str) -> bool:
        return name.startswith(pattern[:-1]) if pattern[-1] == "*" else name == pattern

    def covers(ranges: str | None) -> bool:
        if ranges is None:
            return True
        ends = [re.findall("[0-9]+", part) for part in ranges.split(",")]
        return any(int(end[0]) <= partition <= int(end[-1]) for end in ends)

    return any(
        any(speaks_of(pattern) for pattern in grant.names)
        and (verb in grant.may or (verb is Verb.SUBSCRIBE and Verb.READ in grant.may))
        and covers(grant.partitions)
        and (lock is None or grant.lock_prefixes is None or lock.split(".")[0] in grant.lock_prefixes)
        for grant in grants
    )
