"""Which servers should be up: one document for each that ever was, as it announced itself last.

The list of servers forgets who is gone, because it is made of what each of them holds up itself. This does not, until an
operator takes a server out; whoever judges a cluster compares the two.
"""

from __future__ import annotations

from waltzd.cluster.coordinator import Change, Coordinator, Create, Delete, Set
from waltzd.cluster.document import decode, encode
from waltzd.cluster.meta import ServerMeta
from waltzd.errors import NodeMissing

EXPECTED = "/expected"


async def expected_servers(coordinator: Coordinator) -> dict[str, ServerMeta]:
    """By name."""
    found: dict[str, ServerMeta] = {}
    for name in await coordinator.children(EXPECTED):
        node = await coordinator.get(f"{EXPECTED}/{name}")
        if node is not None:  # else it was taken out since
            found[name] = decode(ServerMeta, node.data, f"{EXPECTED}/{name}")
    return found


async def expecting(coordinator: Coordinator, meta: ServerMeta) -> list[Change]:
    """What to change so that this server is expected, also where somebody has removed the folder."""
    path, data = f"{EXPECTED}/{meta.name}", encode(meta)
    node = await coordinator.get(path)
    if node is not None:
        return [Set(path, data, node.version)]
    folder = [] if await coordinator.get(EXPECTED) is not None else [Create(EXPECTED, b"")]
    return [*folder, Create(path, data)]


async def forget_server(coordinator: Coordinator, name: str) -> None:
    """It is not expected any more, until it announces itself again."""
    path = f"{EXPECTED}/{name}"
    node = await coordinator.get(path)
    if node is None:
        raise NodeMissing(f"the coordinator has no document {path}", path=path)
    await coordinator.commit([Delete(path, node.version)])
