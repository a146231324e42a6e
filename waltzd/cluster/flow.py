"""Minimum-cost flow through a network of pipes, each with a capacity and a price. Pure.

`Network.send` repeatedly finds all cheapest routes that have capacity left and fills them, so the price of the amount that
was sent is always the minimum for that amount. Flow can be sent back through a used pipe, which refunds its price: that
is how an early choice is corrected later.
"""

from __future__ import annotations

from collections import deque


class Network:
    """A network of `places` nodes, numbered from 0. Prices are never negative."""

    def __init__(self, places: int) -> None:
        self._pipes: list[list[int]] = [[] for _ in range(places)]
        """Pipes that leave each place. A pipe and its reverse have the numbers 2n and 2n + 1."""
        self._ends: list[int] = []
        self._room: list[int] = []
        self._prices: list[int] = []

    def add(self, start: int, end: int, *, capacity: int, price: int) -> int:
        """Add a pipe and return its number."""
        assert capacity >= 0
        assert price >= 0
        pipe = len(self._ends)
        self._pipes[start].append(pipe)
        self._pipes[end].append(pipe + 1)
        self._ends += (end, start)
        self._room += (capacity, 0)
        self._prices += (price, -price)
        return pipe

    def sent(self, pipe: int) -> int:
        """Return the amount that flows through the pipe."""
        return self._room[pipe + 1]

    def send(self, source: int, target: int) -> int:
        """Send as much as possible from `source` to `target`; return the amount."""
        total = 0
        while (prices := self._price_from(source))[target] is not None:
            total += self._fill(source, target, prices)
        return total

    def _price_from(self, source: int) -> list[int | None]:
        """Return the price of the cheapest route to each place; None for a place without a route."""
        found: list[int | None] = [None] * len(self._pipes)
        found[source] = 0
        waiting, is_waiting = deque([source]), [False] * len(self._pipes)
        while waiting:
            place = waiting.popleft()
            is_waiting[place] = False
            so_far = found[place]
            assert so_far is not None
            for pipe in self._pipes[place]:
                end, price = self._ends[pipe], so_far + self._prices[pipe]
                known = found[end]
                if self._room[pipe] and (known is None or price < known):
                    found[end] = price
                    if not is_waiting[end]:
                        is_waiting[end] = True
                        waiting.append(end)
        return found

    def _fill(self, source: int, target: int, prices: list[int | None]) -> int:
        """Send as much as the cheapest routes can carry, those with the fewest pipes first; return the amount."""
        total = 0
        while (steps := self._steps_from(source, prices))[target] is not None:
            total += self._fill_shortest(source, target, prices, steps)
        return total

    def _is_on_route(self, pipe: int, start: int, prices: list[int | None]) -> bool:
        price = prices[start]
        return self._room[pipe] > 0 and price is not None and price + self._prices[pipe] == prices[self._ends[pipe]]

    def _steps_from(self, source: int, prices: list[int | None]) -> list[int | None]:
        """Return the number of pipes to each place on the cheapest routes; None for a place that they do not reach."""
        steps: list[int | None] = [None] * len(self._pipes)
        steps[source] = 0
        reached = [source]
        number = 0
        while reached:
            number += 1
            following = []
            for place in reached:
                for pipe in self._pipes[place]:
                    end = self._ends[pipe]
                    if steps[end] is None and self._is_on_route(pipe, place, prices):
                        steps[end] = number
                        following.append(end)
            reached = following
        return steps

    def _fill_shortest(self, source: int, target: int, prices: list[int | None], steps: list[int | None]) -> int:
        """Walk along the cheapest routes: fill a route at the target, go back one pipe at a dead end. Return the amount."""
        total, place = 0, source
        route: list[int] = []
        tried = [0] * len(self._pipes)
        while True:
            if place == target:
                amount = min(self._room[pipe] for pipe in route)
                for pipe in route:
                    self._room[pipe] -= amount
                    self._room[pipe ^ 1] += amount
                total += amount
                full = next(at for at, pipe in enumerate(route) if not self._room[pipe])
                place = self._ends[route[full] ^ 1]
                del route[full:]
            elif tried[place] < len(self._pipes[place]):
                pipe = self._pipes[place][tried[place]]
                end = self._ends[pipe]
                if self._is_on_route(pipe, place, prices) and steps[end] == len(route) + 1:
                    route.append(pipe)
                    place = end
                else:
                    tried[place] += 1
            elif route:
                place = self._ends[route.pop() ^ 1]
                tried[place] += 1
            else:
                return total
