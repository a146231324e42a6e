"""Gathering what `waltzctl doctor` judges: a look at the cluster, the ensemble of ZooKeeper, and certificates.

Everything here is asked at the same time and has a deadline; what does not answer becomes a fact that is not known.
"""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import version

from waltzctl.reach import Reach
from waltzctl.watching.diagnosis import Facts, ZooKeeperServer
from waltzctl.watching.expiry import days_left, own_days
from waltzctl.watching.verdict import Sighting
from waltzd.protocol.address import parse_address
from waltzd.protocol.role import Role

ANSWER_BYTES_MAX = 4096


async def examine(reach: Reach, sighting: Sighting, *, seconds: float) -> Facts:
    found = sighting.picture
    daemons = [
        *((view.meta.name, Role.SERVER, view.meta.admin_listen) for view in found.servers),
        *((view.meta.name, Role.STORAGE, view.meta.admin_listen) for view in found.storages),
    ]
    ensemble = await asyncio.gather(*(_ask(address.strip(), seconds) for address in reach.hosts.split(",")))
    days: dict[str, float | None] = {}
    if reach.tls is not None:
        files = [reach.origins[f"tls_{name}"][0] for name in ("certificate", "key", "ca")]
        days = {"waltzctl": own_days(*files), **await days_left(reach.tls, daemons, seconds=seconds)}
    return Facts(
        picture=found,
        coordinator_error=None if sighting.lost is None else sighting.lost.cause.message,
        coordinator_ms=sighting.coordinator_ms,
        ensemble=tuple(ensemble),
        tool_version=version("waltz"),
        is_secured=reach.tls is not None,
        certificate_days=days,
    )


async def _ask(address: str, seconds: float) -> ZooKeeperServer:
    """The four letters `srvr`, which every ZooKeeper answers unless somebody forbade it."""
    started = time.perf_counter()
    try:
        place = parse_address(address)
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(place.host, place.port)
            try:
                writer.write(b"srvr")
                answer = await reader.read(ANSWER_BYTES_MAX)
                while more := await reader.read(ANSWER_BYTES_MAX - len(answer)) if len(answer) < ANSWER_BYTES_MAX else b"":
                    answer += more
            finally:
                writer.transport.abort()
    except TimeoutError:
        return ZooKeeperServer(address=address, mode=None, milliseconds=None, trouble=f"no answer in {seconds:g} seconds")
    except (OSError, ValueError) as error:
        return ZooKeeperServer(address=address, mode=None, milliseconds=None, trouble=str(error))
    milliseconds = (time.perf_counter() - started) * 1000
    for line in answer.decode("ascii", "replace").splitlines():
        name, colon, value = line.partition(": ")
        if name == "Mode" and colon:
            return ZooKeeperServer(address=address, mode=value.strip(), milliseconds=milliseconds)
    trouble = "it does not say how it is: is `srvr` in its 4lw.commands.whitelist?"
    return ZooKeeperServer(address=address, mode=None, milliseconds=milliseconds, trouble=trouble)
