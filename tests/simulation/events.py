"""What each event of a plan does to a simulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.plan import Event
from tests.simulation.server_machine import ServerMachine
from tests.simulation.storage_machine import StorageMachine

if TYPE_CHECKING:
    from tests.simulation.world import Simulation


def happen(world: Simulation, event: Event) -> None:
    machine = world.machines().get(event.who)
    if event.what in ("kill", "start", "pause", "halt", "resume"):
        assert machine is not None
        getattr(machine, event.what)()
    elif event.what == "set clock":
        assert machine is not None
        machine.clock_ahead = event.amount
    elif event.what == "pass time":
        world.skip(event.amount)
    elif event.who == "group":
        assert world.subscribers is not None
        world.subscribers.happen(event)
    elif event.who == "policy":
        assert world.policies is not None
        world.policies.happen(event)
    elif event.who in world.operators and event.what == "place":
        partitions, _, storages = event.other.partition(":")
        goal = tuple(sorted(storages.split(",")))
        world.operators[event.who].place(
            {int(number): goal for number in partitions.split(",")}, is_taking_out=bool(event.amount)
        )
    elif event.who in world.operators and event.what == "upgrade":
        world.operators[event.who].upgrade()
    elif event.who in world.operators and event.what == "finalize":
        world.operators[event.who].finalize(event.amount)
    elif event.what == "install":
        assert world.versions is not None
        world.versions.install(event.who, event.other)
    elif event.who in world.clients and event.what == "lie":
        world.clients[event.who].lie(event.amount)
    elif event.who in world.storages and event.what in _TO_STORAGES:
        _TO_STORAGES[event.what](world, world.storages[event.who], event)
    elif event.who in world.servers and event.what in _TO_SERVERS:
        _TO_SERVERS[event.what](world.servers[event.who], event)
    elif event.what in _TO_NETWORK:
        _TO_NETWORK[event.what](world, event)
    else:
        raise ValueError(f"nobody knows how to do this: {event}")


def _only_down(storage: StorageMachine, act: Callable[[], object]) -> None:
    if not storage.is_up:
        act()


def _set_slow_disk(world: Simulation, storage: StorageMachine, event: Event) -> None:
    storage.disk_seconds = event.amount


_TO_STORAGES: dict[str, Callable[[Simulation, StorageMachine, Event], None]] = {
    "power": lambda world, storage, event: storage.cut_power(is_scattered=bool(event.amount)),
    "slow disk": _set_slow_disk,
    "hang disk": lambda world, storage, event: storage.hang(event.amount),
    "flush error": lambda world, storage, event: storage.fail_next_flush(),
    "full": lambda world, storage, event: storage.fill(),
    "room": lambda world, storage, event: storage.make_room(),
    "flip": lambda world, storage, event: world.say(storage.name, storage.flip(event.amount)),
    "rot": lambda world, storage, event: world.say(storage.name, storage.rot(event.amount)),
    "forge": lambda world, storage, event: storage.start_forging(),
    "verify": lambda world, storage, event: storage.start_verifying(),
    "copy in place": lambda world, storage, event: _only_down(storage, storage.put_back_in_place),
    "snapshot": lambda world, storage, event: _only_down(storage, storage.put_back_snapshot),
    "photograph": lambda world, storage, event: storage.take_photograph(),
    "wipe": lambda world, storage, event: _only_down(storage, storage.lose_disk),
    "disaster": lambda world, storage, event: world.lose_all_but(storage, event.amount),
    "lose when level": lambda world, storage, event: world.lose_when_level(storage),
    "old copy": lambda world, storage, event: _only_down(storage, storage.put_back_photograph),
    "die at operation": lambda world, storage, event: storage.die_at(int(event.amount)),
    "stop": lambda world, storage, event: storage.stop(),
}


_TO_SERVERS: dict[str, Callable[[ServerMachine, Event], None]] = {
    "expire": lambda server, event: server.session.expire() if server.session is not None else None,
    "lose answer": lambda server, event: server.session.coordinator.lose_answer() if server.session is not None else None,
    "stop": lambda server, event: server.stop(),
}


def _down(world: Simulation, event: Event) -> None:
    world.zookeeper.is_up = event.what == "up"
    world.zookeeper.changed()


def _documents(world: Simulation, event: Event) -> None:
    if event.what in ("delete document", "spoil document"):
        world.zookeeper.spoil(event.other, None if event.what == "delete document" else b"{oops")
    elif event.what == "remember":
        world.zookeeper.remember()
    else:
        world.zookeeper.go_back()


def _mend_way(world: Simulation, event: Event) -> None:
    world.network.mend(event.who, event.other)
    world.zookeeper.changed()


def _die_at_message(world: Simulation, event: Event) -> None:
    world.network.watched[event.who] = (int(event.amount), world.machines()[event.who].kill)


_TO_NETWORK: dict[str, Callable[[Simulation, Event], None]] = {
    "cut": lambda world, event: world.network.cut(event.who, event.other),
    "mend": _mend_way,
    "slow": lambda world, event: world.network.slow_down(event.who, event.amount),
    "reset": lambda world, event: world.network.break_connections(event.who),
    "refuse": lambda world, event: world.network.refuse(event.who),
    "accept": lambda world, event: world.network.accept(event.who),
    "die at message": _die_at_message,
    "remember": _documents,
    "vanish": lambda world, event: world.vanish(event.amount),
    "go back": _documents,
    "delete document": _documents,
    "spoil document": _documents,
    "down": _down,
    "up": _down,
}
