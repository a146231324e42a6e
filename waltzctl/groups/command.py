"""`waltzctl group list` and `describe`: who works on what, how far, and what does not go on.

Every server knows every group; the owner of a partition alone knows who works there. So all servers are asked, and what one
of them does not say is missed by name.
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
from waltzd.errors import EXIT_OK
from waltzd.wire.tls import Tls

GroupName = Annotated[str, Argument(metavar="NAME")]


def list_(*, target: CommandTarget, output: AnyForm = "table") -> int:
    """The consumer groups, a line each: mode, its partitions, how it is where it is worst, how many members work for it,
    its lag, what members have in their hands, and what was put aside. The lag counts transactions that are committed and
    not done; those that the filter of the group leaves out count until the group has come to them.

    \b
    Examples:
      waltzctl group list
      waltzctl group list -o wide
    """
    put(show.groups(using(target, lambda cluster: asked(cluster, target.tls))), output)
    return EXIT_OK


def describe(*, name: GroupName, target: CommandTarget, output: AnyForm = "table") -> int:
    """One consumer group: its settings, where it stands in each partition, and its members. Everything up to the floor is
    acknowledged or put aside. One that is stopped gives nothing out there until `waltzctl group resume`; one that is paused
    goes on by itself.

    \b
    Examples:
      waltzctl group describe mailer
      waltzctl group describe mailer -o json
    """
    found, view = using(target, lambda cluster: one_of(cluster, target.tls, name))
    put(show.group(view, found), output)
    return EXIT_OK


async def one_of(cluster: Cluster, tls: Tls | None, name: str) -> tuple[Groups, GroupView]:
    """The group of this name. Raises when no server that answers knows it, or none answers."""
    found = await asked(cluster, tls, name)
    view = found.named(name)
    if view is not None:
        return found, view
    everything = await asked(cluster, tls)
    raise unknown("consumer group", name, [one.name for one in everything.groups])
