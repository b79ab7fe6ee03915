"""Choose a number of experts of every layer, the most urgent first, and equally many from every position over all
layers.

If each position holds one expert per layer, a layer by itself cannot balance positions without passing urgent experts
by. Over all layers there is a choice: one layer takes its most loaded expert from here, another from there.

The most urgent experts are taken one after the other as long as layer and position have room. If a layer then finds
room at none of its positions, other experts are moved along a shortest chain. So the choice is not the best in every
case, but every layer has its number, and no position gives two more than another.

Source: PEC (2024), Algorithm 1 ("we constrain the equal save capacity of each rank"), which balances each layer by
itself.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

Urgency = Mapping[int, tuple[int, ...]]
"""Keys of one layer's available experts: the smallest key is the most urgent."""


def balanced(layers: Sequence[Urgency], positions: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[list[int]]:
    """Return the experts of each layer.

    Args:
        layers: available experts of each layer.
        positions: position of each expert, by layer.
        numbers: experts to take of each layer, if there are as many.
    """
    wanted = [min(number, len(layer)) for layer, number in zip(layers, numbers, strict=True)]
    choice = _Choice(layers, positions, sum(wanted))
    everything = sorted((key, i, expert) for i, layer in enumerate(layers) for expert, key in layer.items())
    for _, i, expert in everything:
        if len(choice.taken[i]) < wanted[i] and choice.has_room(positions[i][expert]):
            choice.take(i, expert)
    for i, number in enumerate(wanted):
        while len(choice.taken[i]) < number:
            choice.move_for(i)
    return [sorted(taken) for taken in choice.taken]


class _Choice:
    """The experts taken so far. Of `total` experts, each position gives an equal part, and some give one more."""

    def __init__(self, layers: Sequence[Urgency], positions: Sequence[Sequence[int]], total: int) -> None:
        self._layers, self._positions = layers, positions
        self._all = sorted({place for row in positions for place in row})
        self._least, self._more = divmod(total, len(self._all))
        """Experts given by each position, and number of positions giving one more."""
        self.taken: list[set[int]] = [set() for _ in layers]
        self._given: Counter[int] = Counter()

    def has_room(self, position: int) -> bool:
        """Return whether a position can give another expert."""
        return self._given[position] < self._least or (self._given[position] == self._least and self._spare > 0)

    def take(self, layer: int, expert: int) -> None:
        """Take an expert."""
        self.taken[layer].add(expert)
        self._given[self._positions[layer][expert]] += 1

    def move_for(self, layer: int) -> None:
        """Take one more expert of `layer`, and move other layers' experts along a shortest chain to make room."""
        came_by: dict[int, tuple[int, int, int | None, int]] = {}
        """Per position: layer and expert to take, expert given up for it, and the position that gave way."""
        waiting = deque[tuple[int, int | None, int]]([(layer, None, -1)])
        while waiting:
            i, leaving, origin = waiting.popleft()
            for expert in self._untaken(i):
                position = self._positions[i][expert]
                if position in came_by:
                    continue
                came_by[position] = i, expert, leaving, origin
                if self.has_room(position):
                    self._follow(came_by, position)
                    return
                waiting.extend(self._leaving(position))
        # No position can give way: the layer's number counts for more.
        self.take(layer, self._untaken(layer)[0])

    def _follow(self, came_by: Mapping[int, tuple[int, int, int | None, int]], position: int) -> None:
        while position >= 0:
            i, expert, leaving, origin = came_by[position]
            self.take(i, expert)
            if leaving is not None:
                self.taken[i].remove(leaving)
                self._given[self._positions[i][leaving]] -= 1
            position = origin

    def _leaving(self, position: int) -> Iterator[tuple[int, int | None, int]]:
        """Yield experts that could give way to `position`: its own, or those of positions that give one more."""
        full = {position}
        if self._given[position] == self._least:
            full |= {each for each in self._all if self._given[each] > self._least}
        found = [
            (self._layers[i][expert], i, expert)
            for i, taken in enumerate(self.taken)
            for expert in taken
            if self._positions[i][expert] in full
        ]
        for _, i, expert in sorted(found, reverse=True):  # the least urgent first
            yield i, expert, position

    def _untaken(self, layer: int) -> list[int]:
        left = self._layers[layer].keys() - self.taken[layer]
        return sorted(left, key=lambda expert: (self._layers[layer][expert], expert))

    @property
    def _spare(self) -> int:
        return self._more - sum(number > self._least for number in self._given.values())
