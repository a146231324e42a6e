"""Nemeses of the network: cuts of every shape, loss, delay, links that come and go, connections that break."""

from __future__ import annotations

import asyncio
import contextlib

from tests.chaos import sandbox
from tests.chaos.nemesis import Nemesis, a_kind
from tests.chaos.network import CLIENTS
from tests.chaos.plan import DAEMONS, SERVERS, STORAGES, ZOOKEEPER, Part


class Link(Nemesis):
    """What is wrong with a link has the name of the strike, and ends with it."""

    @property
    def why(self) -> str:
        return f"{self.kind.name} {self.target}"

    async def end(self) -> None:
        self.world.network.mend(self.why)


@a_kind("cut", DAEMONS, Part.LINK, refusal=sandbox.refusal)
class Cut(Link):
    """From all others, both ways."""

    async def begin(self) -> None:
        self.world.network.cut(self.why, [self.target], self.world.network.others(self.target))


@a_kind("cut-one-way", DAEMONS, Part.LINK, refusal=sandbox.refusal)
class CutOneWay(Link):
    """It hears and is not heard, or the other way round."""

    async def begin(self) -> None:
        network = self.world.network
        mute = self.pick.random() < 0.5
        self.remarks.append("mute" if mute else "deaf")
        one, others = [self.target], network.others(self.target)
        network.trouble(self.why, one if mute else others, others if mute else one, loss=1.0)


class CutFrom(Link):
    """From some, while it talks with the others."""

    def whom(self) -> list[str]:
        raise AssertionError("each of these says from whom")

    async def begin(self) -> None:
        whom = self.whom()
        self.remarks.append("from " + ", ".join(whom))
        self.world.network.cut(self.why, [self.target], whom)


@a_kind("cut-from-zookeeper", SERVERS, Part.LINK, refusal=sandbox.refusal)
class CutFromZooKeeper(CutFrom):
    def whom(self) -> list[str]:
        return [ZOOKEEPER]


@a_kind("cut-from-storages", SERVERS, Part.LINK, refusal=sandbox.refusal)
class CutFromStorages(CutFrom):
    def whom(self) -> list[str]:
        return self.pick.sample(STORAGES, self.pick.randint(1, len(STORAGES)))


@a_kind("cut-from-clients", SERVERS, Part.LINK, refusal=sandbox.refusal)
class CutFromClients(CutFrom):
    def whom(self) -> list[str]:
        return [CLIENTS]


@a_kind("loss", DAEMONS, Part.LINK, refusal=sandbox.refusal)
class Loss(Link):
    """Some packets are lost and some come twice, both ways."""

    async def begin(self) -> None:
        network = self.world.network
        loss = self.pick.choice((0.01, 0.05, 0.1, 0.3))
        self.remarks.append(f"{loss:.0%}")
        others = network.others(self.target)
        network.trouble(self.why, [self.target], others, loss=loss, doubled=0.02)
        network.trouble(self.why, others, [self.target], loss=loss, doubled=0.02)


@a_kind("delay", DAEMONS, Part.LINK, refusal=sandbox.refusal)
class Delay(Link):
    """Late both ways; with jitter, packets overtake each other."""

    async def begin(self) -> None:
        network = self.world.network
        seconds = self.pick.choice((0.01, 0.05, 0.2))
        self.remarks.append(f"{seconds * 1000:.0f} ms")
        jitter = seconds * self.pick.choice((0.0, 0.5))
        others = network.others(self.target)
        network.trouble(self.why, [self.target], others, delay_seconds=seconds, jitter_seconds=jitter)
        network.trouble(self.why, others, [self.target], delay_seconds=seconds, jitter_seconds=jitter)


@a_kind("flap", DAEMONS, Part.LINK, refusal=sandbox.refusal)
class Flap(Link):
    """The link comes and goes."""

    _task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        self._task = asyncio.create_task(self._flap())

    async def _flap(self) -> None:
        network = self.world.network
        while True:
            network.cut(self.why, [self.target], network.others(self.target))
            await asyncio.sleep(self.pick.uniform(0.05, 0.8))
            network.mend(self.why)
            await asyncio.sleep(self.pick.uniform(0.05, 0.8))

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await super().end()


@a_kind("reset", DAEMONS, Part.LINK, refusal=sandbox.refusal)
class Reset(Nemesis):
    """All its connections break at once."""

    async def begin(self) -> None:
        await asyncio.to_thread(self.world.network.reset, self.target)

    async def end(self) -> None:
        """They are made again."""
