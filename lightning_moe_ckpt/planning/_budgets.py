"""Bytes that a generation may take: as given, or as steps can hide, the smallest of all ranks.

A budget covers everything that one rank writes. A partial generation takes the dense part first; the rest is for
experts. The rest and the measurements differ between ranks, so every rank sends its own with the votes of a window, and
the smallest counts. So all ranks choose alike, and no rank writes more than its budget.

Source: MOETION (2024), Sec. 4.3; we differ in measuring over the whole run, and in agreeing on the smallest.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import rate_text, size_text
from lightning_moe_ckpt.native import measure_bandwidth
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.policies import MEMORY, STORAGE, Budget, ExpertLayout, Experts, Selection
from lightning_moe_ckpt.snapshot import PlanRecord, StateView, StepLayout, lay_out
from lightning_moe_ckpt.storage import SegmentLayout
from lightning_moe_ckpt.tiers import RING_HEADROOM, Mirroring

log = rank_logger(__name__)

MEASURED_STEPS = 3
"""Steps of an incarnation before the first measured budgets and compute precisions."""

BUDGET_SHARE = 0.8
"""Part of the measured bandwidth that a generation may use; the rest absorbs noise."""

NOISE = 0.2
"""Part by which measured budgets must change to count."""

_REMEMBERED_STEPS = 32
"""Newest steps whose median counts."""

_BANDWIDTH_NBYTES = 16 * 2**20

_NAMES = {MEMORY: "local_budget", STORAGE: "remote_budget"}
"""The user's argument for each level's budget."""


@dataclass(frozen=True, kw_only=True)
class SlotSizes:
    """Bytes of this rank's segment of one level."""

    bare: int
    """Bytes without any expert."""
    full: int
    """Bytes with all experts."""
    gradients: tuple[int, int] = (0, 0)
    """Bytes of gradients behind these two segments."""

    def behind(self, nbytes: int) -> int:
        """Return the bytes of gradients behind a segment of up to `nbytes`."""
        (bare, full), experts = self.gradients, min(nbytes, self.full) - self.bare
        return bare - (bare - full) * max(0, experts) // max(1, self.full - self.bare)

    def experts(self, budget: int, nbytes: int) -> int:
        """Return the bytes of one position's experts that fit, out of `nbytes` in all: this rank writes its share."""
        return max(0, budget - self.bare) * nbytes // max(1, self.full - self.bare)

    def missing(self, budget: int, wanted: int, nbytes: int) -> int:
        """Return the bytes by which a budget must grow so that `wanted` bytes of experts of one position fit."""
        return max(0, self.bare + -(-wanted * (self.full - self.bare) // max(1, nbytes)) - budget)


class StepClock:
    """Compute time of steps: from one step's end to the next optimizer step, which copies must not delay."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._since: float | None = None

    def stepped(self) -> None:
        """Note that a step has ended."""
        self._since = time.perf_counter()

    def forward_ends(self) -> None:
        """Note that the optimizer is about to step."""
        if self._since is not None:
            self._seconds.append(time.perf_counter() - self._since)
            self._since = None

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self._seconds)

    @property
    def is_steady(self) -> bool:
        """Whether as many steps as the clock remembers have passed since it was last reset."""
        return len(self._seconds) == self._seconds.maxlen

    def forget(self) -> None:
        """Reset the clock: later decisions depend on later steps."""
        self._seconds.clear()


class Budgets:
    """Bytes of a generation that one rank may write, by level; the same on all ranks. Records are copied from `device`."""

    reserve_nbytes = 0
    """Bytes of this rank's largest segment under a budget, with the gradients behind it; 0 if plans decide."""
    peer_nbytes: int | None = None
    """Bytes that holders of copies reserve per segment, and to rebuild one; `None` for the ring's slots."""

    def __init__(self, config: Mapping[str, Budget], device: torch.device, *, every_n_steps: int = 1) -> None:
        self._config, self._device, self._every_n_steps = config, device, every_n_steps
        self.width = len(config) if "auto" in config.values() else 0
        """Integers in `window_inputs`: a budget per level if some follow from what steps can hide."""
        self.clock = StepClock()
        self.remote_rate: Callable[[], float | None] = lambda: None
        """Bytes per second that leave the node at full speed; `None` before anything was sent."""
        self.copies_leave = False
        """Whether other nodes get all that memory takes, so that memory must not take more than can be sent meanwhile."""
        self.local_share = 1.0
        """This rank's own part of the copies to memory; the rest are for other owners."""
        self.in_force: dict[str, int] = {}
        """Bytes by level; empty until ranks have agreed."""
        self.capped: dict[str, int] = {}
        """Bytes by which memory keeps a measured budget below the hidden bytes of steps, by the argument's name."""
        self._local_rate = 0.0
        self._ring_nbytes: int | None = None
        """Bytes of a ring slot, once known: budgets measured later do not exceed it."""

    @property
    def nbytes(self) -> dict[str, int]:
        """Budget of one generation and rank, given or measured, by the argument's name; empty before ranks have agreed."""
        return {_NAMES[level]: self._nbytes(level) for level in self._config} if self.in_force else {}

    @property
    def rates(self) -> dict[str, float]:
        """Measured bytes per second, by the name of the argument whose budget follows from them."""
        measured = [level for level, given in self._config.items() if self.in_force and given == "auto"]
        return {_NAMES[level]: self._rate(level) for level in measured}

    def measure(self) -> None:
        """Estimate `auto` budgets by the bandwidth to memory, since nothing was sent to other nodes yet."""
        if "auto" in self._config.values():
            self._local_rate = rate = measure_bandwidth(_BANDWIDTH_NBYTES, self._device)
            log.info("copies to memory run at %s, steps compute for %.4f s", rate_text(rate), self.clock.median)

    def inputs(self) -> list[int]:
        """Return this rank's budgets for the exchange, by level."""
        return [self._nbytes(level) for level in self._config]

    def window_inputs(self) -> list[int]:
        """Return this rank's present budgets, by level; zeros before enough steps have passed."""
        if not self.clock.is_steady:
            return [0] * len(self._config)
        if not self._local_rate:  # the plan is an earlier incarnation's, maybe from another machine
            self.measure()
        return self.inputs()

    def agreed(self, rows: Sequence[Sequence[int]]) -> None:
        """Put the smallest of all ranks' budgets in force."""
        self.in_force = dict(zip(self._config, map(min, zip(*rows, strict=True)), strict=True))

    def renewed(self, rows: Sequence[Sequence[int]], before: int) -> bool:
        """Take every rank's `window_inputs`; return whether the present budget differs by more than noise from the
        bytes of the plan in force, `before` (0 for a plan without budget).
        """
        if not (found := [min(column) for column in zip(*rows, strict=True)]) or 0 in found:
            return False
        self.clock.forget()
        if not before or abs(found[0] - before) < NOISE * before:
            return False
        self.agreed(rows)
        log.info("steps can hide %s by now, %s when windows were planned", size_text(found[0]), size_text(before))
        return True

    def _nbytes(self, level: str) -> int:
        """Return a level's budget; a measured budget does not outgrow the ring, which is made once."""
        if (given := self._config[level]) != "auto":
            return given
        # Copies to memory must end by the next optimizer step, however far generations are apart.
        steps = 1 if level == MEMORY else self._every_n_steps
        nbytes = max(1, int(self._rate(level) * self.clock.median * steps * BUDGET_SHARE))
        if self._ring_nbytes is None:
            return nbytes
        self._note_cap(level, nbytes - self._ring_nbytes, self._ring_nbytes)
        return min(nbytes, self._ring_nbytes)

    def _note_cap(self, level: str, over: int, ring_nbytes: int) -> None:
        name = _NAMES[level]
        if over > 0 and name not in self.capped:
            log.info(
                "`%s='auto'`: steps could hide %s, and memory was made for %s, which is what counts. A restart "
                "makes it anew",
                *(name, size_text(ring_nbytes + over), size_text(ring_nbytes)),
            )
        if over > 0 or name in self.capped:
            self.capped[name] = max(over, 0)

    def _rate(self, level: str) -> float:
        leaves = level == STORAGE or self.copies_leave
        rate, local = self.remote_rate() if leaves else None, self._local_rate * self.local_share
        if rate is None:
            return local
        return rate if level == STORAGE else min(rate, local)


class ExpertBudgets(Budgets):
    """Budgets left for experts, to memory and to storage, in bytes per position. `sizes` measures this rank's segments."""

    def __init__(
        self,
        config: Mapping[str, Budget],
        device: torch.device,
        layouts: Sequence[ExpertLayout],
        sizes: Callable[[], Mapping[str, SlotSizes]],
        *,
        every_n_steps: int = 1,
    ) -> None:
        super().__init__(config, device, every_n_steps=every_n_steps)
        self._layouts, self._sizes, self.width = layouts, sizes, len(config)
        self._warned: set[str] = set()

    @override
    def measure(self) -> None:
        super().measure()
        if "auto" in self._config.values():
            self._ring_nbytes = int(self._segment_nbytes * (1 + RING_HEADROOM))

    @property
    def reserve_nbytes(self) -> int:  # type: ignore[override]  # follows the sizes of segments
        if STORAGE not in self._config:
            return 0
        # A measured budget may grow up to memory's; gradients are kept for the experts that leave the node.
        given = self._config[STORAGE]
        remote = self._nbytes(MEMORY) if given == "auto" else min(self._nbytes(MEMORY), given)
        return self._segment_nbytes + self._sizes()[STORAGE].behind(max(remote, self._least_nbytes))

    @property
    def peer_nbytes(self) -> int | None:  # type: ignore[override]  # as above
        if STORAGE not in self._config:
            return None
        sizes, nbytes = self._sizes()[STORAGE], max(self._nbytes(STORAGE), self._least_nbytes)
        return int((min(nbytes, sizes.full) + sizes.behind(nbytes)) * (1 + RING_HEADROOM))

    @override
    def window_inputs(self) -> list[int]:
        return self.inputs()

    @override
    def renewed(self, rows: Sequence[Sequence[int]], before: int) -> bool:
        """Put the smallest of all ranks' budgets in force. Return false: every window has its own plan, so none is due for them."""
        self.agreed(rows)
        return False

    @override
    def inputs(self) -> list[int]:
        """Return the bytes of one position's experts that this rank could take, by level."""
        sizes, nbytes, least = self._sizes(), self._position_nbytes(), self._least()
        found = []
        for level in self._config:
            budget = self._nbytes(level)
            found.append(sizes[level].experts(budget, nbytes))
            if found[-1] < least:
                self._warn(level, budget, sizes[level].missing(budget, least, nbytes))
        return found

    @override
    def agreed(self, rows: Sequence[Sequence[int]]) -> None:
        smallest = [max(self._least(), min(column)) for column in zip(*rows, strict=True)]
        found = {level: self._unless_noise(level, n) for level, n in zip(self._config, smallest, strict=True)}
        if STORAGE in found:
            found[STORAGE] = min(found[STORAGE], found[MEMORY])
        if found != self.in_force:
            self.in_force = found
            said = ", ".join(f"{size_text(nbytes)} to {level}" for level, nbytes in found.items())
            log.info("budgets: of the experts of one position, %s (of %s)", said, size_text(self._position_nbytes()))

    # -- private

    @override
    def _note_cap(self, level: str, over: int, ring_nbytes: int) -> None:
        if ring_nbytes < self._sizes()[level].full:  # else all experts fit already
            super()._note_cap(level, over, ring_nbytes)

    @property
    def _segment_nbytes(self) -> int:
        """Bytes of this rank's segment under the budget in force."""
        return min(self._nbytes(MEMORY), self._sizes()[MEMORY].full)

    @property
    def _least_nbytes(self) -> int:
        """Bytes of this rank's smallest segment, with one expert of each position."""
        sizes = self._sizes()[STORAGE]
        return sizes.bare + -(-self._least() * (sizes.full - sizes.bare) // self._position_nbytes())

    def _unless_noise(self, level: str, nbytes: int) -> int:
        """Return `nbytes`, or the budget in force if a measured budget has hardly changed: an unchanged plan keeps its layout."""
        before = self.in_force.get(level)
        if before is None or self._config[level] != "auto" or abs(nbytes - before) >= NOISE * before:
            return nbytes
        return before

    def _position_nbytes(self) -> int:
        positions = len({rank for layout in self._layouts for rank in layout.rank_of})
        return sum(layout.nbytes * layout.num_experts for layout in self._layouts) // positions

    def _least(self) -> int:
        """Return the least budget of a position in bytes, its largest expert: under less, large experts would never be taken."""
        return max(layout.nbytes for layout in self._layouts)

    def _warn(self, level: str, budget: int, missing: int) -> None:
        if level not in self._warned and STORAGE in self._config:
            self._warned.add(level)
            log.warning(
                "`%s` of %s has no room for an expert beside the dense part: one is taken all the same. Give %s more "
                "(%d bytes), or take generations less often",
                *(_NAMES[level], size_text(budget), size_text(missing), missing),
            )


def slot_sizes(
    view: StateView, groups: ParallelGroups, journal_nbytes: int, mirroring: Mirroring
) -> dict[str, SlotSizes]:
    """Return the sizes of this rank's segments by level, without experts and with all experts, from layouts made for it."""
    everything = tuple(tuple(range(layer.num_experts)) for layer in view.operators.layers)
    nothing: Experts = tuple(() for _ in everything)

    def step(memory: Experts, storage: Experts) -> StepLayout:
        plan = Selection(memory, storage).plan(view.operators)
        record = PlanRecord.over(view.operators, plan=plan, config={})
        return lay_out(record, view, groups, journal_nbytes).mirrored(mirroring).steps[0]

    bare, local, remote = step(nothing, nothing), step(everything, nothing), step(everything, everything)
    gradients = (
        bare.nbytes - bare.files_nbytes - bare.mirrors_nbytes,
        remote.nbytes - remote.files_nbytes - remote.mirrors_nbytes,
    )
    second = SegmentLayout([], metadata={}).nbytes  # bytes of a second file without experts
    return {
        MEMORY: SlotSizes(bare=bare.files_nbytes + second, full=local.files_nbytes, gradients=gradients),
        STORAGE: SlotSizes(bare=bare.files_nbytes, full=remote.files_nbytes, gradients=gradients),
    }
