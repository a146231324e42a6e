"""What a daemon shows at `http_listen`: its metrics, whether it lives, and whether it is ready.

A page of metrics can be long, so it is spelled on a thread; what it says is read before, at one moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import TypeAlias

from waltzd import metrics
from waltzd.http_port import Answer, HttpPort, Question
from waltzd.readiness import Unready
from waltzd.role import Role
from waltzd.setting import Address

Collect: TypeAlias = Callable[[], Awaitable[metrics.Families]]
"""What the daemon says of itself; the families may be made later and on another thread, from values that stay."""


def watch_port(address: Address, role: Role, unready: Unready, collect: Collect) -> HttpPort:
    async def show_metrics(question: Question) -> Answer:
        families = chain(await collect(), metrics.of_port(role, failed=port.failed))
        body, kind = await asyncio.to_thread(metrics.page, families, question.accept)
        return Answer(status=200, body=body, kind=kind)

    async def show_life(_: Question) -> Answer:
        return Answer.text(200, "it lives")

    async def show_readiness(_: Question) -> Answer:
        reasons = await unready()
        return Answer.text(503, *reasons) if reasons else Answer.text(200, "ready")

    port = HttpPort(address, {"/metrics": show_metrics, "/healthz": show_life, "/readyz": show_readiness})
    return port
