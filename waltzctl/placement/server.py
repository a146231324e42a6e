"""`waltzctl server`: which servers are up, and which of them take partitions.

Draining is said to the server itself, which announces it; the leader then gives its partitions to others. It lasts as long
as the process: a server that was started again takes part again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from waltzctl.certificate import first_contact
from waltzctl.change import Asking, agree, check_again, recorded
from waltzctl.interruption import interruptible
from waltzctl.job import STAYS
from waltzctl.options import Output
from waltzctl.picture.look import look
from waltzctl.placement.handover import Handover, arrival
from waltzctl.placement.ownership import TIMEOUT_SECONDS, Owners, Patience, Wait, moves_json, rounded
from waltzctl.reach import Meant, Reach, ServerName, unknown, using
from waltzctl.safety import Danger, Plan
from waltzctl.show.change import put_plan
from waltzctl.show.cluster import servers
from waltzctl.show.forms import AnyForm, put
from waltzd.cluster.assignment import moved, spell_numbers
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import Assignment, ServerMeta
from waltzd.errors import EXIT_OK
from waltzd.wire.servers import ServerAdminClient

VERB = "server drain"


def list_(*, reach: Meant, output: AnyForm = "table") -> int:
    """Show the servers: what they own, how many of that is open, and which one leads. One that should be up and is not is
    `down`, until it is started again or taken out with `waltzctl server remove`.

    \b
    Examples:
      waltzctl server list
      waltzctl server list -o json
    """
    found = using(reach, lambda cluster: look(cluster.coordinator, tls=reach.tls))
    put(servers(found), output)
    return EXIT_OK


def drain(
    *,
    server: ServerName,
    asked: Asking,
    reach: Meant,
    wait: Wait = True,
    timeout: Patience = TIMEOUT_SECONDS,
    output: Output = "table",
) -> int:
    """Let a server give all its partitions to others and take no new ones, before it is stopped or looked after. It ends
    when the server owns nothing and its partitions are open elsewhere. The server takes
    part again after `waltzctl server undrain`, or when it was started again.

    \b
    Examples:
      waltzctl server drain server-1 --dry-run
      waltzctl server drain server-1 --yes --reason "new memory"
    """
    found, numbers = using(reach, lambda cluster: look_before(cluster, reach, server))
    made, after = drain_plan(found, server, numbers)
    if not agree(made, asked, reach, output):
        return EXIT_OK

    async def do(cluster: Cluster) -> float | None:
        async with recorded(cluster, made, asked):
            check_again(drain_plan(await Owners.of(cluster), server, numbers)[0], asked)
            await announce(reach, found, server, is_draining=True)
            if not wait or after is None:
                return None
            wanted = Handover(numbers=tuple(numbers), to={}, leaving=server)
            return await arrival(cluster, wanted, key=found.meta.key, tls=reach.tls, seconds=timeout)

    with interruptible(STAYS):
        seconds = using(reach, do)
    moves = [] if after is None else moves_json(found.assignment, after)
    put_plan(made, output, result="done", moves=moves, seconds=rounded(seconds))
    return EXIT_OK


def undrain(*, server: ServerName, asked: Asking, reach: Meant, output: Output = "table") -> int:
    """Let a server that drains take partitions again.

    \b
    Examples:
      waltzctl server undrain server-1
      waltzctl server undrain server-1 --dry-run -o json
    """
    found = using(reach, Owners.of)
    made, after = undrain_plan(found, server)
    if not agree(made, asked, reach, output):
        return EXIT_OK

    async def do(cluster: Cluster) -> None:
        async with recorded(cluster, made, asked):
            await announce(reach, found, server, is_draining=False)

    with interruptible(STAYS):
        using(reach, do)
    put_plan(made, output, result="done", moves=moves_json(found.assignment, after))
    return EXIT_OK


def remove(*, server: ServerName, asked: Asking, reach: Meant, output: Output = "table") -> int:
    """Do not expect a server any more that was stopped for good: `waltzctl status` complains until then that it is not up.
    One that is up is refused: stop it first. It is expected again when it is started again.

    \b
    Examples:
      waltzctl server remove server-3 --dry-run
      waltzctl server remove server-3 --yes --reason "the machine is given back"
    """

    async def plan(cluster: Cluster) -> Plan:
        up, expected = await cluster.servers(), await cluster.expected_servers()
        if server not in {**up, **expected}:
            raise unknown("server", server, {**up, **expected})
        return Plan(
            verb="server remove",
            subject=server,
            steps=(f"{server} is not expected to be up any more",),
            unsafe=(f"{server} is up: stop it first, or it is expected again at once",) if server in up else (),
        )

    made = using(reach, plan)
    if not agree(made, asked, reach, output):
        return EXIT_OK

    async def do(cluster: Cluster) -> None:
        async with recorded(cluster, made, asked):
            check_again(await plan(cluster), asked)
            await cluster.forget_server(server)

    with interruptible(STAYS):
        using(reach, do)
    put_plan(made, output, result="done")
    return EXIT_OK


async def look_before(cluster: Cluster, reach: Reach, server: str) -> tuple[Owners, list[int]]:
    """And the partitions that the server has to give away, or has not closed yet."""
    found = await Owners.of(cluster)
    address = meta_of(found, server).admin_listen
    admin = ServerAdminClient(address, found.meta.key, tls=reach.tls, name=server)
    async with admin, first_contact(address, reach.tls):
        said = await admin.describe()
    assigned = (number for number, owner in enumerate(found.assignment.owners) if owner.server == server)
    return found, sorted({*assigned, *(held.partition for held in said.partitions)})


async def announce(reach: Reach, found: Owners, server: str, *, is_draining: bool) -> None:
    address = found.servers[server].admin_listen
    admin = ServerAdminClient(address, found.meta.key, tls=reach.tls, name=server)
    async with admin, first_contact(address, reach.tls):
        await admin.drain(is_draining)


def drain_plan(found: Owners, server: str, numbers: Sequence[int]) -> tuple[Plan, Assignment | None]:
    """And the assignment that the leader will come to; None when nobody could take the partitions."""
    before = meta_of(found, server)
    servers = {**found.servers, server: replace(before, is_draining=True)}
    steps = [] if before.is_draining else [f"{server} takes no partitions any more"]
    if all(other.is_draining for other in servers.values()):
        nobody = f"{server} is the only server that takes partitions"
        unsafe = f"{nobody}: nobody would take over {spell_numbers(numbers)}" if numbers else nobody
        return Plan(verb=VERB, subject=server, steps=tuple(steps), unsafe=(unsafe,) if steps else ()), None
    after = found.planned(servers, found.preferences)
    steps += [f"the leader moves {part}" for part in moved(found.assignment, after)]
    if numbers and not steps:
        steps = [f"{server} closes {spell_numbers(numbers)}"]
    return Plan(verb=VERB, subject=server, steps=tuple(steps)), after


def undrain_plan(found: Owners, server: str) -> tuple[Plan, Assignment]:
    before = meta_of(found, server)
    servers = {**found.servers, server: replace(before, is_draining=False)}
    after = found.planned(servers, found.preferences)
    steps: tuple[str, ...] = ()
    if before.is_draining:
        steps = (
            f"{server} takes partitions again",
            *(f"the leader moves {part}" for part in moved(found.assignment, after)),
        )
    return Plan(verb="server undrain", subject=server, steps=steps, danger=Danger.NONE), after


def meta_of(found: Owners, server: str) -> ServerMeta:
    if server not in found.servers:
        raise unknown("server", server, found.servers)
    return found.servers[server]
