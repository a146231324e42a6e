"""What outlives processes: a machine with a name, and the supervisor that starts its daemon again."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from tests.simulation.faulty_store import FaultyStore
from tests.simulation.loop import Life, SimLoop
from tests.simulation.network import Network
from tests.simulation.plan import Plan, Setup
from waltzd.cluster.documents import ClusterMeta

if TYPE_CHECKING:
    from tests.simulation.coordinator import ZooKeeper
    from tests.simulation.operators import OperatorMachine
    from tests.simulation.policies import Policies
    from tests.simulation.server_machine import ServerMachine
    from tests.simulation.storage_machine import StorageMachine
    from tests.simulation.versions import Versions

RESTART_SECONDS = 1.0
"""How long the supervisor waits before it starts a daemon again that ended by itself."""
ZOOKEEPER = "zookeeper"
FIRST_SECOND = 1_800_000_000
"""When all runs begin."""


def server_address(name: str) -> str:
    return f"{name}:1"


class Exited(BaseException):
    """This process is over: nothing that stands behind the call that raised this is done."""


class World(Protocol):
    """What the machines of one simulation share."""

    loop: SimLoop
    network: Network
    plan: Plan
    setup: Setup
    pick: random.Random
    meta: ClusterMeta
    zookeeper: ZooKeeper
    storages: dict[str, StorageMachine]
    servers: dict[str, ServerMachine]
    store: FaultyStore | None
    """Of the archive."""
    policies: Policies | None
    """None: everybody may do everything."""
    operators: dict[str, OperatorMachine]
    versions: Versions | None
    """None: all daemons have one version."""
    log_count: int
    """The partitions, and behind them the group log where there is one."""
    latest_shown: int
    """The highest time, in microseconds, that a clock has shown."""
    skipped: float
    """Seconds that have passed at once, in which nothing happened."""

    def say(self, who: str, what: str) -> None: ...
    def mistake(self, error: BaseException) -> None: ...


class Machine(ABC):
    """A name under which processes live, one after the other."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.life: Life | None = None
        self.lives: list[Life] = []
        self.is_wanted = False
        """It shall run: its supervisor starts it again when it ends by itself."""
        self._restart: asyncio.TimerHandle | None = None
        self.clock_ahead = 0.0
        """So many seconds what it shows as the time of day is wrong."""

    def microseconds(self) -> int:
        """Since 1970, as its clock shows them."""
        shown = round((FIRST_SECOND + self.world.loop.now + self.world.skipped + self.clock_ahead) * 1e6)
        self.world.latest_shown = max(self.world.latest_shown, shown)
        return shown

    @property
    def is_up(self) -> bool:
        return self.life is not None

    def begin(self) -> Life:
        setup, pick = self.world.setup, self.world.pick
        ahead = pick.random() * 1000 if setup.drift else 0.0
        rate = 1 + setup.drift * (2 * pick.random() - 1)
        self.life = Life(self.name, ahead=ahead, rate=rate)
        self.lives.append(self.life)
        return self.life

    def end(self, why: str) -> None:
        """The process is gone, in the middle of its work."""
        life, self.life = self.life, None
        if life is not None:
            self.world.say(self.name, why)
            life.is_over = True
            self.world.network.left(life)

    def start(self) -> None:
        self.is_wanted = True
        if not self.is_up:
            self.world.say(self.name, "starts")
            life = self.begin()
            self.world.loop.run_in(life, self._live(life), f"life of {self.name}")

    @abstractmethod
    async def _live(self, life: Life) -> None:
        """What the process does from its start on."""

    def exits(self, life: Life, why: str) -> None:
        """By itself; it is started again after a while."""
        if self.life is life:
            self.end(why)
            if self._restart is not None:
                self._restart.cancel()
            self._restart = self.world.loop.after(RESTART_SECONDS, None, self.again)

    def again(self) -> None:
        """Start it, if it shall run and does not."""
        if self.is_wanted and not self.is_up:
            self.start()

    def kill(self) -> None:
        self.is_wanted = False
        self.end("is killed")

    def pause(self) -> None:
        if self.life is not None:
            self.life.is_paused = True

    def halt(self) -> None:
        """Stop it with its clock, as a virtual machine that is suspended; `resume` lets both go on."""
        if self.life is not None and not self.life.is_paused:
            self.life.is_paused, self.life.halted_at = True, self.world.loop.now

    def resume(self) -> None:
        if self.life is not None and self.life.is_paused:
            if self.life.halted_at is not None:  # its time of day stood still as well
                self.clock_ahead -= self.world.loop.now - self.life.halted_at
            self.world.loop.resume(self.life)
