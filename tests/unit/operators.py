"""What operators do to the cluster of `relocation_model`, and what else happens there, drawn from a seed.

Each command is what `waltzctl/placement/` does between what was typed and what is shown: the plan that an operator agrees
to is made of the very value that is carried out. Tools are killed between any two calls, two may run at once, storages fall
silent. In the end nothing interferes any more: each command that was begun is run again and must come to its end, or say
why not. `python -m tests.unit.operators SEED` tells what happened.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.unit.relocation_model import Owner, Tool, Violation, World
from waltzctl.placement.mover import MoveOptions, carry_out, placement_state
from waltzctl.placement.replica_moves import Goals, MovePlan, PlacementState
from waltzctl.placement.storage import addition, removal, replacement, switching, was_taken_out
from waltzctl.shell.safety import Plan
from waltzd.cluster.documents import Membership, StorageMeta
from waltzd.errors import BadArgument
from waltzd.errors.operations import ChangedMeanwhile, NameInUse, NoSuchName, Unsafe

COMMANDS_MAX = 4
STEPS = 220
AT_ONCE = 2
REST_STEPS = 40
STEPS_TO_END = 3000
"""So long may a command take when nothing interferes: many times longer than any was seen to take."""
SAID = (Unsafe, BadArgument, NoSuchName, NameInUse, BadArgument)
"""How a command may say why it does not do what was asked."""
Act = Callable[[Tool], Coroutine[Any, Any, Plan | None]]


# -- commands ----------------------------------------------------------------------------------------------------------


def _agree(plan: Plan) -> bool:
    """An operator who never overrides anything, and says yes to everything else."""
    if plan.refusals:
        raise Unsafe("; ".join(plan.refusals))
    return bool(plan.steps)


def relocate(aim: Callable[[PlacementState], MovePlan], gone: Gone | None = None) -> Act:
    """What `Request.perform` does with it. `gone`: a storage that is taken out, and whether it was before."""

    async def act(tool: Tool) -> Plan:
        now = await placement_state(tool.cluster, tool)
        is_gone = gone is not None and gone.name not in now.storages
        if gone is not None and is_gone and await was_taken_out(tool.cluster, gone.name, replaced_as=gone.replaced_as):
            return Plan(verb="storage remove", subject=gone.name, steps=())
        move_plan = aim(now)
        plan = move_plan.plan()
        if _agree(plan):
            async with tool.recorded(plan):
                await carry_out(tool.cluster, tool, aim, move_plan, MoveOptions(), lambda *_: None)
        return plan

    return act


@dataclass(frozen=True)
class Gone:
    name: str
    replaced_as: str | None = None


def add(storage: StorageMeta, *, spreads: bool) -> Act:
    return relocate(lambda now: addition(now, storage, None, spreads=spreads))


def remove(name: str, *, fewer_replicas: bool) -> Act:
    return relocate(lambda now: removal(now, name, fewer_replicas=fewer_replicas), Gone(name))


def substitute(old: str, new: StorageMeta) -> Act:
    return relocate(lambda now: replacement(now, old, new, None), Gone(old, f"{old} {new.name}"))


def assign(number: int, name: str) -> Act:
    def aim(now: PlacementState) -> MovePlan:
        return moved("partition assign", now, {number: tuple(sorted({*now.goals[number], now.storage(name).name}))})

    return relocate(aim)


def unassign(number: int, names: set[str]) -> Act:
    def aim(now: PlacementState) -> MovePlan:
        left = tuple(name for name in now.goals[number] if name not in names)
        return moved("partition assign", now, {number: left})

    return relocate(aim)


def spread(replicas: int | None) -> Act:
    def aim(now: PlacementState) -> MovePlan:
        wanted = {number: replicas or len(names) for number, names in now.goals.items()}
        return moved("cluster set", now, now.spread(now.groups, wanted))

    return relocate(aim)


def moved(verb: str, now: PlacementState, goals: Goals) -> MovePlan:
    return MovePlan(now=now, verb=verb, subject="model", goals=goals)


def take_offline(number: int, name: str) -> Act:
    async def act(tool: Tool) -> Plan:
        now = await placement_state(tool.cluster, tool)
        now.storage(name)
        level = set(now.found.level(number))
        plan = switching(now, name, [number], is_online=False)
        if _agree(plan):
            async with tool.recorded(plan):
                tool.world.offline.add((name, number))
                if level and plan.margins and plan.margins[0].before.spare >= 0:
                    _check_left(now.roles(number), level - {name}, number)
        return plan

    return act


def _check_left(roles: Mapping[str, Membership], level: set[str], number: int) -> None:
    members = [name for name, role in roles.items() if role is Membership.MEMBER]
    if 2 * sum(name in level for name in members) <= len(members):
        raise Violation(f"partition {number} was left with {sorted(level)} of {members}")


# -- a run -------------------------------------------------------------------------------------------------------------


@dataclass
class Begun:
    name: str
    act: Act
    tool: Tool | None = None


class Run:
    """One sequence. `is_calm`: nothing fails, and one command comes after the other."""

    def __init__(self, seed: int, *, is_calm: bool | None = None) -> None:
        self.world = World(seed)
        self.random = self.world.random
        self.is_calm = seed % 5 == 0 if is_calm is None else is_calm
        self.pace = self.random.choice((0.45, 0.45, 0.1))
        """How much of what happens is done by owners."""
        self.begun: list[Begun] = []
        self.outcomes: list[str] = []

    def draw(self) -> Begun:
        random, world = self.random, self.world
        number, name, other = random.randrange(world.count), random.choice(world.names), random.choice(world.names)
        listed = sorted(world.storages)
        fewer, replicas = random.random() < 0.5, random.choice((None, 1, 2, 3, 4))
        some = set(random.sample(listed, random.randint(1, len(listed)))) if listed else {name}
        known = random.choice(listed) if listed else name
        kind = random.choice(
            ("add", "add", "remove", "remove", "replace", "replace", "assign", "unassign", "unassign", "set", "offline")
        )
        match kind:
            case "add":
                return Begun(f"add {name}", add(world.storage(name), spreads=random.random() < 0.8))
            case "remove":
                return Begun(f"remove {known}", remove(known, fewer_replicas=fewer))
            case "replace":
                return Begun(f"replace {known} {other}", substitute(known, world.storage(other)))
            case "assign":
                return Begun(f"assign {number} {known}", assign(number, known))
            case "unassign":
                return Begun(f"unassign {number} {' '.join(sorted(some))}", unassign(number, some))
            case "set":
                return Begun(f"set {replicas}", spread(replicas))
            case _:
                return Begun(f"offline {number} {known}", take_offline(number, known))

    def start(self, begun: Begun) -> Tool:
        self.world.say(f"waltzctl {begun.name}")
        begun.tool = Tool(self.world, begun.name, begun.act)
        return begun.tool

    @property
    def running(self) -> list[Tool]:
        return [begun.tool for begun in self.begun if begun.tool is not None and not begun.tool.is_over]

    def event(self) -> None:
        """Something happens."""
        world, random, running = self.world, self.random, self.running
        world.steps += 1
        chance = random.random()
        if chance < self.pace or (self.is_calm and chance > 0.9):
            random.choice(world.owners).act()
        elif chance < 0.88 and running:
            self._step(random.choice(running))
        elif chance < 0.93 and len(running) < (1 if self.is_calm else AT_ONCE) and len(self.begun) < COMMANDS_MAX:
            self.begun.append(self.draw())
            self.start(self.begun[-1])
        elif self.is_calm:
            return
        elif chance < 0.97:
            self._fault()
        elif chance < 0.985 and running:
            tool = random.choice(running)
            tool.kill()
            self._tell(tool)
        world.check()

    def _step(self, tool: Tool) -> None:
        before = self.world.sets
        tool.step()
        self._tell(tool)
        after = self.world.sets
        if after != before and not self.is_calm and self.random.random() < 0.25:  # now it hurts most
            changed = [
                one for one in self.world.owners if before.partitions[one.partition] != after.partitions[one.partition]
            ]
            self._crash(changed)

    def _crash(self, owners: Sequence[Owner]) -> None:
        owner = self.random.choice(owners)
        self.world.say(f"the owner of partition {owner.partition} is killed")
        owner.crash()

    def _fault(self) -> None:
        world, random = self.world, self.random
        name = random.choice(world.names)
        if name not in world.up or random.random() < 0.5:
            world.say(f"{name} comes")
            world.up.add(name)
        else:
            world.say(f"{name} falls silent")
            world.up.discard(name)
        if random.random() < 0.2:
            self._crash(world.owners)
        if world.offline and random.random() < 0.3:
            world.offline.discard(random.choice(sorted(world.offline)))

    def _tell(self, tool: Tool) -> None:
        if tool.is_over:
            self.world.say(f"waltzctl {tool.name}: {tool.outcome}")
            self.outcomes.append(f"{tool.name.partition(' ')[0]}: {tool.outcome.partition(' ')[0]}")

    def go(self) -> Run:
        try:
            while self.world.steps < STEPS:
                self.event()
            self._heal()
            for begun in self.begun:
                self._to_the_end(begun)
            self._settle()
        except Violation as violation:
            for tool in self.running:
                tool.kill()
            story = "\n".join(self.world.trace)
            raise Violation(f"seed {self.world.seed}: {violation}\n{story}") from None
        return self

    # -- the end

    def _heal(self) -> None:
        world = self.world
        for tool in self.running:
            tool.kill()
            self._tell(tool)
        world.up = set(world.names)
        world.offline.clear()
        for owner in world.owners:
            owner.haste = 1.0
        self.is_calm = True
        world.say("nothing interferes any more")
        self._rest()

    def _rest(self) -> None:
        """Owners do what they can by themselves."""
        for _ in range(REST_STEPS * self.world.count):
            self.world.steps += 1
            self.random.choice(self.world.owners).act()
        self.world.check()

    def _finish(self, begun: Begun) -> Tool:
        """A command from its beginning to its end, while owners do their work."""
        tool, world = self.start(begun), self.world
        for _ in range(STEPS_TO_END):
            world.steps += 1
            if self.random.random() < 0.5:
                self.random.choice(world.owners).act()
            else:
                tool.step()
                if tool.is_over:
                    self._tell(tool)
                    world.check()
                    return tool
            if world.steps % 8 == 0:
                world.check()
        raise Violation(f"waltzctl {begun.name} does not come to its end")

    def _to_the_end(self, begun: Begun) -> None:
        """It was killed, or refused, or is done: to run it again ends well, or says why not. An owner that has just made a
        member of a learner is a reason to look again."""
        for _ in range(10):
            tool = self._finish(begun)
            self.world.offline.clear()
            if tool.error is None:
                assert tool.result is not None
                return self._check_done(begun, was_there=not tool.result.steps)
            if isinstance(tool.error, SAID):
                return None
            if not isinstance(tool.error, ChangedMeanwhile):
                break
        raise Violation(f"waltzctl {begun.name} does not come to its end: {tool.error}")

    def _check_done(self, begun: Begun, *, was_there: bool) -> None:
        """What was asked for is there, and another run has nothing to do. `was_there`: nor had this one."""
        words = begun.name.split()
        listed, sets = self.world.storages, self.world.sets.partitions
        match words:
            case ["add", name]:
                kept = name in listed
            case ["remove", name]:
                kept = name not in listed and all(name not in roles for roles in sets.values())
            case ["replace", old, new]:
                kept = old not in listed and (new in listed or was_there)  # the new one may have gone since, too
            case ["assign", number, name]:
                kept = name in sets[int(number)]
            case ["unassign", number, *names]:
                kept = not set(names) & set(sets[int(number)])
            case ["set", replicas]:
                kept = replicas == "None" or all(len(roles) == int(replicas) for roles in sets.values())
            case _:
                return
        if not kept:
            raise Violation(f"waltzctl {begun.name} says that it is done; there are {sorted(listed)}, {sets}")
        again = self._finish(begun)
        if again.error is not None or again.result is None or again.result.steps:
            raise Violation(f"waltzctl {begun.name} has something to do again: {again.result}, {again.error}")

    def _settle(self) -> None:
        """One last time evenly over all that is there: nothing is on its way any more."""
        world = self.world
        self._rest()
        for _ in range(10):
            tool = self._finish(Begun("set None", spread(None)))
            if not isinstance(tool.error, ChangedMeanwhile):
                break
        if tool.error is not None:
            raise Violation(f"all is well, and replicas cannot be spread: {tool.error}")
        if world.moves.partitions:
            raise Violation(f"still on their way: {world.moves.partitions}")
        for _ in range(STEPS_TO_END):
            if all(self._is_whole(owner.partition) for owner in world.owners):
                return
            world.steps += 1
            self.random.choice(world.owners).act()
        raise Violation(f"not every replica takes part in the end: {world.sets.partitions}")

    def _is_whole(self, number: int) -> bool:
        owner = self.world.owners[number]
        return owner.is_open and owner.counts == set(self.world.sets.partitions[number])


def go_all(seeds: Iterable[int]) -> Counter[str]:
    """These sequences; how commands ended, and how often. A `Violation` has the seed and the whole story."""

    async def go() -> Counter[str]:  # a loop must run, although nobody waits for it
        return Counter(outcome for seed in seeds for outcome in Run(seed).go().outcomes)

    return asyncio.run(go())


async def _tell(seed: int) -> None:
    print("\n".join(Run(seed).go().world.trace))


if __name__ == "__main__":
    asyncio.run(_tell(int(sys.argv[1])))
