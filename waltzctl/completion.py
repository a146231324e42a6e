"""What a shell offers behind TAB: names that the cluster has at this moment.

Nobody waits long for it, and nothing is said when it cannot be had: a shell has no place for errors.
"""

from __future__ import annotations

from collections.abc import Callable

import click

SECONDS = 2.0


def storages(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    return _names(ctx, "storages", incomplete)


def servers(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    return _names(ctx, "servers", incomplete)


def contexts(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    from waltzctl.reach import load_contexts

    return _quietly(lambda: [name for name in sorted(load_contexts().named) if name.startswith(incomplete)])


def _names(ctx: click.Context, kind: str, incomplete: str) -> list[str]:
    def ask() -> list[str]:
        from waltzctl.reach import GIVEN, resolve
        from waltzd.client.loop import run
        from waltzd.cluster.cluster import Cluster
        from waltzd.cluster.zookeeper import ZooKeeperCoordinator

        reach = resolve({name: ctx.params.get(name) for name in GIVEN})

        async def look() -> list[str]:
            coordinator = ZooKeeperCoordinator(reach.hosts, reach.root, call_seconds=SECONDS)
            await coordinator.start()
            try:
                cluster = Cluster(coordinator)
                found = await (cluster.storages() if kind == "storages" else cluster.servers())
            finally:
                await coordinator.close()
            return [name for name in found if name.startswith(incomplete)]

        return run(look())

    return _quietly(ask)


def _quietly(ask: Callable[[], list[str]]) -> list[str]:
    from waltzd.errors import WaltzError

    try:
        return ask()
    except WaltzError:
        return []
