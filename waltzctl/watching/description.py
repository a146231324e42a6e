"""What daemons and the coordinator say, as plain JSON for whoever reads it elsewhere. No payload comes near this."""

from __future__ import annotations

import re
from typing import Any

from waltzctl.picture.picture import Picture
from waltzctl.show.forms import plain
from waltzd.cluster.cluster import CLIENT_IDS
from waltzd.cluster.coordinator import Coordinator


def describe(found: Picture) -> dict[str, Any]:
    """What each daemon said of itself, by its name."""
    return {view.meta.name: plain(view.said) for view in found.nodes if view.said is not None}


_SECRET = re.compile(rb'("secret":\s*)"[^"]*"')


async def metadata_tree(coordinator: Coordinator) -> dict[str, bytes]:
    """Every document as it is, but for what servers keep secret, by the path of a file: `/servers/one.json`. Folders have
    no content."""
    documents: dict[str, bytes] = {}
    paths = ["/"]
    for path in paths:  # grows while it is walked
        node = await coordinator.get(path)
        if node is not None and node.data:
            shown = _SECRET.sub(rb'\1"(left out)"', node.data) if path == CLIENT_IDS else node.data
            documents["/cluster.json" if path == "/" else f"{path}.json"] = shown
        paths += [f"{path.rstrip('/')}/{name}" for name in await coordinator.children(path)]
    return documents
