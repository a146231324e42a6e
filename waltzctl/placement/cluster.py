"""`waltzctl create-cluster`, `waltzctl cluster` and `waltzctl history`: a cluster as a whole, through its coordinator."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

from typer import Option

from waltzctl.change import Asking
from waltzctl.interruption import interruptible
from waltzctl.job import NOTHING_BEGUN, Job, perform
from waltzctl.options import Output
from waltzctl.picture import last_seen
from waltzctl.picture.look import look
from waltzctl.placement.creation import Wish, check_wish, create_cluster
from waltzctl.placement.partition import spread_all
from waltzctl.placement.terms import Moving
from waltzctl.progress import Say
from waltzctl.reach import Meant, using
from waltzctl.safety import Danger, Plan
from waltzctl.show.change import history as told_history
from waltzctl.show.cluster import creation, picture
from waltzctl.show.forms import AnyForm, put
from waltzctl.show.terminal import is_line
from waltzd.cluster.cluster import HISTORY_MAX, Cluster
from waltzd.cluster.documents import StorageMeta
from waltzd.disk.real import translate
from waltzd.errors import EXIT_OK, EXIT_UNHEALTHY, AlreadyThere, BadArgument, Unsafe
from waltzd.format.layout import PARTITIONS_MAX
from waltzd.protocol.address import is_name, parse_address

INCOMPLETE = "Interrupted. The cluster may be written down already, with some replicas: the same command completes it."
FORM = "write it as name=host:port,host:port or name=host:port,host:port,group"
GROUP_CHARACTERS_MAX = 64


def storage_of(text: str) -> StorageMeta:
    """What `--storage` says. A storage is a group of its own unless it is told which one it belongs to."""
    name, equals, rest = text.partition("=")
    parts = rest.split(",")
    if not equals or len(parts) not in (2, 3):
        raise BadArgument(f"--storage {text}: this is not a storage", next_step=FORM)
    try:
        listen, admin = (str(parse_address(part)) for part in parts[:2])
    except ValueError as error:
        raise BadArgument(f"--storage {text}: {error}", next_step=FORM) from error
    if not is_name(name):
        raise BadArgument(f"{name!r} is not a name: letters, digits, dots, dashes and underscores, at most 64")
    for group in parts[2:]:
        check_group(group, f"--storage {text}")
    return StorageMeta(name=name, listen=listen, admin_listen=admin, group=parts[2] if len(parts) == 3 else name)


def check_group(text: str, place: str) -> None:
    """Before any daemon is asked."""
    if not text:
        raise BadArgument(f"{place}: the group has no name", next_step=FORM)
    if len(text) > GROUP_CHARACTERS_MAX or not is_line(text) or text != text.strip():
        raise BadArgument(
            f"{place}: the name of a group has at most {GROUP_CHARACTERS_MAX} characters, all of which can be shown, no "
            "blanks around it"
        )


def create(
    *,
    name: Annotated[str, Option("--name", help="What the cluster is called.")],
    partitions: Annotated[
        int, Option("--partitions", min=1, max=PARTITIONS_MAX, help="For ever; ids and locks belong to a partition.")
    ],
    given: Annotated[
        tuple[str, ...],
        Option(
            "--storage",
            metavar="NAME=LISTEN,ADMIN[,GROUP]",
            help="A storage: its name, its two addresses, and the group that it may fail with. Once for each.",
        ),
    ],
    replicas: Annotated[int, Option("--replicas", min=1, max=15, help="Of each partition.")] = 3,
    key: Annotated[UUID | None, Option("--key", help="The cluster key; the one that the storages have by default.")] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Look at everything, show what would be done, write nothing.")
    ] = False,
    reach: Meant,
    output: Output = "table",
) -> int:
    """Make a cluster of storages that run: its documents in ZooKeeper, and an empty replica wherever one belongs. The
    replicas of a partition are spread over groups, and evenly over the storages.

    The storages must run, with the same cluster_key and number of partitions in their configuration. Where none runs
    yet, this command proposes a key. To repeat it with the same words changes nothing, or completes what is missing.

    \b
    Examples:
      waltzctl create-cluster --coordinator 127.0.0.1:2181 --name trial --partitions 4 --replicas 1 \\
        --storage one=127.0.0.1:55280,127.0.0.1:55281 --dry-run
      waltzctl create-cluster --coordinator 127.0.0.1:2181 --name trial --partitions 4 --replicas 1 \\
        --storage one=127.0.0.1:55280,127.0.0.1:55281,rack-1
    """
    wish = Wish(
        name=name,
        partitions=partitions,
        replication=replicas,
        storages=tuple(storage_of(text) for text in given),
        key=key,
    )
    check_wish(wish)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with interruptible(NOTHING_BEGUN if dry_run else INCOMPLETE):
        found = using(
            reach, lambda cluster: create_cluster(cluster.coordinator, wish, created=now, is_dry=dry_run, tls=reach.tls)
        )
    put(creation(found, hosts=reach.hosts, root=reach.root, is_dry=dry_run), output)
    return EXIT_OK


def describe(*, reach: Meant, output: AnyForm = "table") -> int:
    """Show a cluster: its servers and storages, and who owns each partition and how it is. The end is 0 when all is well,
    and 10 when a process does not answer, a partition takes no transactions, or one has fewer replicas than it should.

    \b
    Examples:
      waltzctl cluster describe --coordinator 127.0.0.1:2181
      waltzctl cluster describe --coordinator 127.0.0.1:2181 --root /waltz -o json
    """
    found = using(reach, lambda cluster: look(cluster.coordinator, tls=reach.tls))
    put(picture(found, where=reach.where), output)
    return EXIT_OK if found.is_healthy else EXIT_UNHEALTHY


def set_(
    *,
    replicas: Annotated[int, Option("--replicas", min=1, max=15, help="Of each partition.")],
    terms: Moving,
    asked: Asking,
    reach: Meant,
    output: Output = "table",
) -> int:
    """Change how many replicas each partition has. More are copied while writing goes on; fewer leave when a majority
    stays. The number of partitions, the name and the key of a cluster cannot be changed.

    \b
    Examples:
      waltzctl cluster set --replicas 3 --dry-run
      waltzctl cluster set --replicas 3 --yes
    """
    return spread_all("cluster set", replicas, reach, asked, output, terms)


def delete(
    *,
    file: Annotated[
        Path | None,
        Option(
            "--save",
            dir_okay=False,
            metavar="FILE",
            help="Where the documents are kept; waltz-CLUSTER-TIME.json here by default.",
        ),
    ] = None,
    asked: Asking,
    reach: Meant,
    output: Output = "table",
) -> int:
    """Take all documents of a cluster out of ZooKeeper; before that they are written to a file, so that they can be put
    back. What is on the storages stays, but nobody serves it any more, and a new cluster refuses storages that hold
    something. It is refused while servers run, and needs --override while storages do.

    \b
    Examples:
      waltzctl cluster delete --dry-run --override local --reason 'a trial is over'
      waltzctl cluster delete --dry-run --override local --reason 'moved elsewhere' -o json
    """

    async def prepare(cluster: Cluster) -> Job:
        await cluster.check_alone()
        found = await look(cluster.coordinator, tls=reach.tls)
        name = found.meta.name
        await _check_rest(cluster, name)
        up = [view.meta.name for view in found.storages if view.error is None]
        path = (file or Path(f"waltz-{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json")).absolute()
        plan = Plan(
            verb="cluster delete",
            subject=name,
            steps=(
                f"write all documents of the cluster {name} to {path}",
                f"delete them, key {found.meta.key}, at {reach.where}",
            ),
            danger=Danger.TYPED,
            unsafe=(f"{', '.join(up)} still run",) if up else (),
        )

        async def do(cluster: Cluster, _say: Say) -> Mapping[str, Any]:
            await _check_rest(cluster, name)
            documents = await _documents(cluster)
            _keep(path, {"version": 1, "cluster": name, "where": reach.where, "documents": documents})
            deleted = await cluster.delete()
            last_seen.path_of(reach.where).unlink(missing_ok=True)
            return {"documents": deleted, "file": str(path)}

        return Job(plan=plan, do=do, is_recorded=False)

    return perform(reach, asked, output, prepare)


async def _check_rest(cluster: Cluster, name: str) -> None:
    """Whoever owns partitions would go on with them, and nobody could take them over."""
    servers = sorted(await cluster.servers())
    if servers:
        raise Unsafe(
            f"the cluster {name} is in use: {', '.join(servers)} run and own its partitions",
            not_done="nothing was deleted",
            next_step="stop the servers first; their registration ends with them",
        )


async def _documents(cluster: Cluster) -> dict[str, str]:
    found, paths = dict[str, str](), ["/"]
    for path in paths:  # grows while it is walked
        node = await cluster.coordinator.get(path)
        if node is not None:
            found[path] = node.data.decode("utf-8", errors="surrogateescape")
        paths += [f"{path.rstrip('/')}/{name}" for name in await cluster.coordinator.children(path)]
    return found


def _keep(path: Path, content: Mapping[str, Any]) -> None:
    """On the disk before anything is deleted, and never over another file. Some documents are secret."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError as error:
        raise AlreadyThere(f"{path} is there already", not_done="nothing was deleted") from error
    except OSError as error:
        raise translate(error, f"writing {path}") from error


def history(
    *,
    newest: Annotated[int, Option("-n", "--newest", min=1, max=HISTORY_MAX, help="So many entries.")] = 20,
    reach: Meant,
    output: AnyForm = "table",
) -> int:
    """Who changed what with waltzctl, when and why, and what came of it. The oldest entries are forgotten after a thousand.

    \b
    Examples:
      waltzctl history
      waltzctl history -n 100 -o json
    """
    put(told_history(using(reach, lambda cluster: cluster.history(newest))), output)
    return EXIT_OK
