"""`waltzctl group list` and `describe`: members, positions, lag and stopped partitions of consumer groups.

Every server knows every group, but only the owner of a partition knows the members there. So all servers are asked, and the
output names the servers that did not answer.
"""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from waltzctl.shell.cluster_target import CommandTarget, unknown, using
from waltzctl.show import group as show
from waltzctl.show.forms import AnyForm, put
from waltzctl.snapshot.groups import Groups, GroupView
from waltzctl.snapshot.groups import groups as asked
from waltzd.cluster.cluster import Cluster
from waltzd.errors.exit_codes import EXIT_OK
from waltzd.wire.tls import Tls

GroupName = Annotated[str, Argument(metavar="NAME")]


def list_(*, target: CommandTarget, output: AnyForm = "table") -> int:
    """List the consumer groups: mode, partitions, worst state, number of members, lag, deliveries in flight, and parked
    transactions (dead letters). The lag counts committed transactions that are not acknowledged or parked; transactions
    that the filter of kinds of the group excludes count until the group reaches them.

    \b
    Examples:
      waltzctl group list
      waltzctl group list -o wide
    """
    put(show.groups(using(target, lambda cluster: asked(cluster, target.tls))), output)
    return EXIT_OK


def describe(*, name: GroupName, target: CommandTarget, output: AnyForm = "table") -> int:
    """Describe a consumer group: its settings, its position in each partition, and its members. All transactions up to the
    floor are acknowledged or parked. A stopped partition delivers nothing until `waltzctl group resume`; a paused one
    resumes by itself.

    \b
    Examples:
      waltzctl group describe mailer
      waltzctl group describe mailer -o json
    """
    found, view = using(target, lambda cluster: one_of(cluster, target.tls, name))
    put(show.group(view, found), output)
    return EXIT_OK


async def one_of(cluster: Cluster, tls: Tls | None, name: str) -> tuple[Groups, GroupView]:
    """Return the group of this name. Raise `NoSuchName` if no server knows it, or an error if no server answers."""
    found = await asked(cluster, tls, name)
    view = found.named(name)
    if view is not None:
        return found, view
    everything = await asked(cluster, tls)
    raise unknown("consumer group", name, [one.name for one in everything.groups])
