"""Define the callbacks whose restarts are exact: sparse (part of the state at every step, all of it in every window) and dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from typing_extensions import Unpack, override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import number_of_bytes
from lightning_moe_ckpt.callbacks._base import CheckpointCallback
from lightning_moe_ckpt.callbacks._shared_arguments import (
    CheckpointArguments,
    require_choice,
    require_count,
    spelled_out,
)
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.policies import (
    DensePolicy,
    DifferentialMode,
    DifferentialPolicy,
    Policy,
    Popularity,
    SparsePolicy,
)

log = rank_logger(__name__)


class SparseCheckpoint(CheckpointCallback):
    """Take part of the operators at every step and resume by sparse-to-dense replay, bit for bit.

    A window has W consecutive steps. Each operator is taken in full at one of them. At the steps before that one, only the
    weights that forward and backward read are taken. A restart loads the snapshot of the window's first step. It then
    repeats W - 1 steps in the ordinary training loop, loads the other snapshots on the way, and goes on training.

    Args:
        url: where checkpoints live, one run per URL: a path, `file://`, `s3://`, `gs://`, `az://` or any fsspec URL.
        window: steps per window; `auto` finds the smallest that fits `budget_nbytes`, or the measured bandwidth.
        every_n_steps: steps from one window's start to the next; `None` for windows back to back. These are further apart where
            they cost more than `overhead_target`, unless the number of steps is yours: `window`, `schedule` or this one.
        budget_nbytes: bytes that one rank may copy per step, a number or text such as `400MB`; `None` measures step time and bandwidth in steps 1 to 3.
        planner: how operators are spread over the window. `algorithm1` is the paper's rule. `packed` takes more operators
            in full at later steps, where fewer are left to take as weights.
        order: which operators are taken in full first: `popularity` the experts with fewest tokens,
            `back_to_front` the last layers, `fixed` the order of the model. Without experts, `popularity` is
            `back_to_front`.
        popularity: how popularity is measured, and when the order follows it; `None` counts tokens and checks the order
            every 100 steps.
        schedule: names of the operators to take in full at each step of the window, instead of a computed plan;
            `moe-ckpt inspect` shows the names.
        max_window: longest window to plan, in steps; it bounds the shared memory that is reserved.
        over_budget: what to do if the weights alone exceed the budget: `stall` waits at the window's first step, `dense`
            takes everything at once, less often.
        dense_every_n_steps: steps after which storage gets everything of one boundary, in the place of the next window, for
            `moe-ckpt export`: a window holds several steps, which only replay makes one. The newest stays until there is a
            newer one. Training waits while it is copied. `None` for none between start and end, which are dense.
        **shared: arguments of every checkpoint callback, see `CheckpointArguments`.

    Raises:
        ConfigurationError: an argument is out of range.

    Source: MoEvement (2026), Sec. 3.2-3.5.
    """

    @spelled_out
    def __init__(
        self,
        url: str | Path,
        *,
        window: int | Literal["auto"] = "auto",
        every_n_steps: int | None = None,
        budget_nbytes: int | str | None = None,
        planner: Literal["packed", "algorithm1"] = "packed",
        order: Literal["popularity", "fixed", "back_to_front"] = "popularity",
        popularity: Popularity | None = None,
        schedule: Sequence[Sequence[str]] | None = None,
        max_window: int = 16,
        over_budget: Literal["stall", "dense"] = "stall",
        dense_every_n_steps: int | None = None,
        **shared: Unpack[CheckpointArguments],
    ) -> None:
        super().__init__(url, **shared)
        require_count(self, "window", window, what="steps", also=["auto"])
        self.window, self.max_window = window, require_count(self, "max_window", max_window, what="steps")
        if window != "auto" and window > max_window:
            raise ConfigurationError(
                f"`SparseCheckpoint(window={window}, max_window={max_window})`: the window exceeds its bound. Raise max_window."
            )
        self.every_n_steps = require_count(self, "every_n_steps", every_n_steps, what="steps", also=[None])
        longest = window if isinstance(window, int) else 1 if schedule is None else len(schedule)
        if every_n_steps is not None and every_n_steps < longest:
            raise ConfigurationError(
                f"`SparseCheckpoint(every_n_steps={every_n_steps})`: a window takes {longest} steps, and windows do not overlap. "
                "Give as many steps or more, or a shorter window."
            )
        self.planner = require_choice(self, "planner", planner, ("packed", "algorithm1"))
        self.order = require_choice(self, "order", order, ("popularity", "fixed", "back_to_front"))
        self.over_budget = require_choice(self, "over_budget", over_budget, ("stall", "dense"))
        if popularity is not None and (order != "popularity" or schedule is not None):
            raise ConfigurationError(
                f"`SparseCheckpoint(popularity=..., order={order!r}, schedule={'...' if schedule else None})`: popularity "
                "is measured only with order='popularity' and without a schedule. Leave it out, or change these."
            )
        if popularity is not None:
            _warn_if_overtaken(popularity, max_window if isinstance(window, str) else window)
        self.budget_nbytes: int | None = number_of_bytes(self, "budget_nbytes", budget_nbytes, also=[None])
        self.popularity, self.schedule = popularity, schedule
        require_count(self, "dense_every_n_steps", dense_every_n_steps, what="steps", also=[None])
        self.dense_every_n_steps = dense_every_n_steps
        if dense_every_n_steps is not None and self.retention.dense == 0:
            self.retention = replace(self.retention, dense=1)

    @override
    def _policy(self) -> Policy:
        schedule = None if self.schedule is None else tuple(tuple(slot) for slot in self.schedule)
        by_popularity = self.order == "popularity" and schedule is None
        return SparsePolicy(
            window=None if self.window == "auto" else self.window,
            budget_nbytes=self.budget_nbytes,
            planner=self.planner,
            order=self.order,
            schedule=schedule,
            max_window=min(self.max_window, self.every_n_steps or self.max_window),
            over_budget=self.over_budget,
            popularity=(self.popularity or Popularity()) if by_popularity else None,
            every_n_steps=self.every_n_steps,
        )


class DenseCheckpoint(CheckpointCallback):
    """Take the full state every `every_n_steps` steps and resume from it, bit for bit.

    Args:
        url: where checkpoints live, one run per URL: a path, `file://`, `s3://`, `gs://`, `az://` or any fsspec URL.
        every_n_steps: most optimizer steps between two snapshots in memory; `None` for 100, or more within `overhead_target`.
        **shared: arguments of every checkpoint callback, see `CheckpointArguments`.

    Raises:
        ConfigurationError: an argument is out of range.

    Source: CheckFreq (2021) and Gemini (2023), the baselines of MoEvement (2026), Sec. 5.
    """

    @spelled_out
    def __init__(
        self, url: str | Path, *, every_n_steps: int | None = None, **shared: Unpack[CheckpointArguments]
    ) -> None:
        super().__init__(url, **shared)
        self.every_n_steps = require_count(self, "every_n_steps", every_n_steps, what="steps", also=[None])

    @override
    def _policy(self) -> Policy:
        return DensePolicy(every_n_steps=self.every_n_steps)


class DifferentialCheckpoint(CheckpointCallback):
    """Take the full state every `every_n_steps` steps, and at every step between what leads there from the step before.

    That is the gradient of each parameter as the optimizer consumed it, after unscaling and clipping, with the settings of
    the step: about a third of the full state of Adam. A restart applies the gradients to the full state in one pass, and
    goes on from the newest step, bit for bit. Steps of torch's own Adam and AdamW are repeated, in float32 and bfloat16, by the
    kernel that took them, if a probe finds it to repeat bits. All other parameters are stored whole at every step, so that
    what is restored is exact all the same; the log says which. Memory keeps the newest steps with their full state: 2 full states and
    `batch + 2` gradients are reserved, or 3 and `2 * batch + 2` (`memory_generations`). Storage gets steps `batch` at a time.

    Weights and optimizer state that hooks change between steps are stored too, if in place or through `param.data`; changes through
    `.data` of the optimizer's state, or through memory shared with NumPy, are not seen.

    Nothing is taken less often for the sake of `overhead_target`: every step is the point of it.

    Args:
        url: where checkpoints live, one run per URL: a path, `file://`, `s3://`, `gs://`, `az://` or any fsspec URL.
        every_n_steps: optimizer steps between two full states.
        batch: steps that storage gets together.
        mode: `bf16` keeps gradients rounded to bfloat16, in half the bytes: what a restart goes on from then differs by their
            rounding since the last full state from what was trained. `compressed` keeps, of tensors of 100,000 elements and
            more, the hundredth that is largest, and others in INT8: a 290th and a 12th of the bytes, and restarts differ by what that
            leaves out.
        error_feedback: with `compressed`, whether what is left out of a gradient is added to the next one, until the next
            full state; takes memory for a gradient of every parameter on its device.
        **shared: arguments of every checkpoint callback, see `CheckpointArguments`.

    Raises:
        ConfigurationError: an argument is out of range.

    Source: TierCheck (2026), Sec. 3.2-3.4.
    """

    @spelled_out
    def __init__(
        self,
        url: str | Path,
        *,
        every_n_steps: int = 64,
        batch: int = 8,
        mode: DifferentialMode = "lossless",
        error_feedback: bool = False,
        **shared: Unpack[CheckpointArguments],
    ) -> None:
        super().__init__(url, **shared)
        self.every_n_steps = require_count(self, "every_n_steps", every_n_steps, what="steps")
        self.batch = require_count(self, "batch", batch, what="steps")
        require_choice(self, "mode", mode, get_args(DifferentialMode))
        if error_feedback and mode != "compressed":
            raise ConfigurationError(
                f"`DifferentialCheckpoint(mode={mode!r}, error_feedback=True)`: only compression leaves something out. Give "
                "mode='compressed', or no error feedback."
            )
        self.mode, self.error_feedback = mode, error_feedback

    @override
    def _policy(self) -> Policy:
        return DifferentialPolicy(
            every_n_steps=self.every_n_steps, batch=self.batch, mode=self.mode, error_feedback=self.error_feedback
        )


def _warn_if_overtaken(popularity: Popularity, longest: int) -> None:
    if popularity.reorder_every_n_steps < longest + 2:
        log.warning(
            "`Popularity(reorder_every_n_steps=%d)` with windows of up to %d steps: a new order can be overtaken before "
            "it starts, and a run that dies in replay may then follow other plans than one that does not (the training "
            "is the same). Look every %d steps or less often.",
            popularity.reorder_every_n_steps,
            longest,
            longest + 2,
        )
