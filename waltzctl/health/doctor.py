"""`waltzctl doctor`: finds problems before they stop a cluster, and names a fix for each. The rules are in
`waltzctl.health.rules`; this module collects their facts: a snapshot, the state of the ZooKeeper ensemble, and expiry
dates of certificates.

Everything is asked at the same time, with a deadline; whatever does not answer stays unknown. The certificate of a
daemon is read in a TLS handshake without any call.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version

from waltzctl.health.facts import Check, Facts, Grade, HealthReport, ZooKeeperServer
from waltzctl.health.poll import CALL_SECONDS, Poll, should_be_closed
from waltzctl.health.rules import diagnose
from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget
from waltzctl.shell.options import Timeout
from waltzctl.show.cluster import checks
from waltzctl.show.forms import AnyForm, put
from waltzctl.snapshot.cluster_snapshot import ServerView
from waltzd.client import loop
from waltzd.cluster.zookeeper_credentials import CoordinatorTls
from waltzd.errors import EXIT_OK, EXIT_UNHEALTHY
from waltzd.protocol.address import parse_address
from waltzd.protocol.role import Role, dns_name
from waltzd.wire.tls import Tls

ANSWER_BYTES_MAX = 4096
DAY_SECONDS = 86_400.0


def doctor(*, seconds: Timeout = CALL_SECONDS, target: CommandTarget, output: AnyForm = "table") -> int:
    """Check a cluster for coming problems: disk speed and space, clocks, open files, certificates, versions, how many
    replicas may fail, lag, failure domains, ZooKeeper, and unfinished work. Nothing is changed.

    Each check is PASS, WARN, FAIL, or UNKNOWN if it could not be made. Exit code 10 if any check is FAIL, else 0.

    \b
    Examples:
      waltzctl doctor
      waltzctl doctor --timeout 10 -o json
    """
    found = loop.run(_checks(target, seconds))
    put(checks(found), output)
    return EXIT_UNHEALTHY if any(check.grade is Grade.FAIL for check in found) else EXIT_OK


async def _checks(target: ClusterTarget, seconds: float) -> list[Check]:
    async with Poll(target, seconds=seconds, aloud=True) as poll:
        report = await poll.report()
        return await examination(poll, report, seconds=seconds)


async def examination(poll: Poll, report: HealthReport, *, seconds: float) -> list[Check]:
    """Run all checks on a new report."""
    facts = await examined(poll.target, report, seconds=seconds)
    if report.lost is None and should_be_closed(poll.target):
        facts = replace(facts, opened=await (await poll.cluster()).open_nodes())
    return diagnose(facts)


async def examined(target: ClusterTarget, report: HealthReport, *, seconds: float) -> Facts:
    """Return the facts of a report, completed by those that only `doctor` needs."""
    addresses = [address.strip() for address in target.hosts.split(",")]
    ensemble = await asyncio.gather(*(_ask(address, target.access.tls, seconds) for address in addresses))
    days: dict[str, float | None] = {}
    if target.tls is not None:
        daemons = [
            (view.meta.name, Role.SERVER if isinstance(view, ServerView) else Role.STORAGE, view.meta.admin_listen)
            for view in report.snapshot.nodes
        ]
        own = (target.tls.current().ends - time.time()) / DAY_SECONDS
        days = {"waltzctl": own, **await days_left(target.tls, daemons, seconds=seconds)}
    return replace(
        report.facts,
        ensemble=tuple(ensemble),
        tool_version=version("waltzd"),
        is_secured=target.tls is not None,
        certificate_days=days,
    )


async def _ask(address: str, tls: CoordinatorTls | None, seconds: float) -> ZooKeeperServer:
    """Ask one ZooKeeper server for its mode with the command `srvr`, which its settings may forbid."""
    started = time.perf_counter()
    try:
        place = parse_address(address)
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(
                place.host, place.port, ssl=None if tls is None else tls.context()
            )
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
    trouble = "it does not report its state: is `srvr` in its 4lw.commands.whitelist?"
    return ZooKeeperServer(address=address, mode=None, milliseconds=milliseconds, trouble=trouble)


async def days_left(tls: Tls, daemons: Sequence[tuple[str, Role, str]], *, seconds: float) -> dict[str, float | None]:
    """Return the days until each daemon's certificate expires. `daemons` holds (name, role, address). A server and a
    storage of one name are told apart by their role."""
    found = await asyncio.gather(*(_days_of(tls, role, address, seconds) for _, role, address in daemons))
    times = Counter(name for name, _, _ in daemons)
    labels = [name if times[name] == 1 else f"{role} {name}" for name, role, _ in daemons]
    return dict(zip(labels, found, strict=True))


async def _days_of(tls: Tls, role: Role, address: str, seconds: float) -> float | None:
    try:
        place = parse_address(address)
        context = tls.calling()
        context.set_alpn_protocols(["h2"])
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(
                place.host, place.port, ssl=context, server_hostname=dns_name(tls.identity.key, role)
            )
    except (OSError, ssl.SSLError, ValueError):  # unreachable, or an invalid certificate: other checks report both
        return None
    found = writer.get_extra_info("peercert")
    writer.transport.abort()
    return _days(found)


def _days(certificate: Mapping[str, object] | None) -> float | None:
    ends = (certificate or {}).get("notAfter")
    return (ssl.cert_time_to_seconds(ends) - time.time()) / DAY_SECONDS if isinstance(ends, str) else None
