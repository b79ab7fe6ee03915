"""What is taken when: the contract of a policy, and the data that it plans from.

A policy is data and pure functions. All ranks hand it equal inputs, so all get the same plan without an exchange. What
it needs measured it says in `needs` and `budgets`; the planner measures that, agrees on it with the other ranks, and
lays plans out. Nobody else asks which policy runs: what differs between policies is said here.

Sources: MoEvement (2026), Sec. 3; PEC (2024), Sec. 3; MOETION (2024), Sec. 4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.operators import OperatorSet
from lightning_moe_ckpt.policies._expert_tables import MAX_GENERATIONS, ExpertLayout, ExpertTable, Selection
from lightning_moe_ckpt.policies._plan import AUDIENCES, Audience, Plan
from lightning_moe_ckpt.policies._popularity import Popularity
from lightning_moe_ckpt.policies._token_ledger import TokenLedger

# Shape suffix: E experts of all layers.

Measurement = Literal["tokens", "popularity", "bandwidths", "compute_dtypes"]
"""What can be measured: tokens that each expert has learned from and every tier has saved; popularity of experts; what
steps can hide, from their time and from bandwidths; the precision in which parameters are consumed."""

DifferentialMode = Literal["lossless", "bf16", "compressed"]
"""Gradients as the optimizer consumed them, rounded to bfloat16, or compressed: INT8 where they are small, else the
hundredth of the elements that is largest."""

Budget = int | Literal["auto"]
"""Bytes of one rank and generation, or `auto` for what steps can hide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deltas:
    """That gradients are sent to other nodes where they lead to what is there to send, and how."""

    kind: Literal["lossless", "bf16"] = "lossless"
    """Whether copies have the bytes of their owner, or are of gradients rounded to bfloat16."""
    resync_every: int = 64
    """Generations of rounded gradients until a whole one is sent with them, and the difference is told."""

    @property
    def dtype(self) -> torch.dtype:
        """Of gradients as they are kept and sent."""
        return torch.float32 if self.kind == "lossless" else torch.bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class Chains:
    """That generations between two of everything have what leads from one step to the next (TierCheck, Sec. 3.2)."""

    every_n_steps: int
    """Steps from one generation of everything, a *base*, to the next at most."""
    batch: int
    """Differentials that storage gets together, in one generation."""
    mode: DifferentialMode = "lossless"
    """How gradients are kept."""
    error_feedback: bool = False
    """Whether what compression leaves out of a gradient is added to the next one."""

    @property
    def links_kept(self) -> int:
        """Differentials that memory has room for: a batch that storage takes, and one that is gathered meanwhile."""
        return min(self.every_n_steps - 1, 2 * self.batch)

    def ends_batch(self, steps: int) -> bool:
        """Return whether the differential `steps` steps behind its base is the last one of a batch."""
        return steps % self.batch == 0 or steps + 1 >= self.every_n_steps


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """What a plan is made of; what decides anything is equal on all ranks."""

    operators: OperatorSet
    """Of this rank, cut into pieces if the policy asked for that."""
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes that this rank writes of the FULL and the COMPUTE record of each operator."""
    popularity: Sequence[float] = ()
    """By expert, over all ranks; zeros where it is not measured."""
    budgets: Mapping[str, int] = field(default_factory=dict)
    """By level, the smallest of all ranks: bytes of a step, or of the experts of one position if generations are partial."""
    index: int = 0
    """Generations of this run before this one."""
    ledger: TokenLedger | None = None
    """What tiers have saved, where tokens are counted."""
    coming: Tensor | None = None
    """int64 `[E]`: tokens that experts will have learned from besides when the plan is carried out, as far as can be told."""
    layouts: Sequence[ExpertLayout] = ()
    """Of the experts in the ledger."""
    bad: Collection[int] = ()
    """Experts, by place over all layers, that are to be taken before all others: a stored copy turned out bad."""
    generations_kept: int | None = None
    """Generations that memory was made for; `None` before the first plan."""
    made_for: Mapping[str, int] = field(default_factory=dict)
    """Budgets that memory was made for; empty before the first plan."""

    @cached_property
    def tables(self) -> list[ExpertTable]:
        """The ledger by layer."""
        assert self.ledger is not None
        return self.ledger.tables(self.layouts, self.bad, self.coming)


class Policy(ABC):
    """What is taken when. Defaults are those of a policy that takes everything in each generation."""

    kind: ClassVar[str]
    """Names it in markers."""
    cuts: ClassVar[bool] = True
    """Whether parts of one state may be restored from different steps: an optimizer then has to update each element alone."""
    exact: ClassVar[bool] = True
    """Whether a generation has everything as of one step, so that restores are exact. Else its plans are partial."""
    replays: ClassVar[bool] = False
    """Whether a restart runs steps again that the run before it had taken."""
    callback: ClassVar[str] = ""
    """What the user calls it, where messages name it."""
    peer_audiences: ClassVar[frozenset[Audience]] = frozenset(AUDIENCES)
    """Files that copies on other nodes have."""
    popularity: Popularity | None = None
    """How popularity is measured, where it is needed."""
    deltas: Deltas | None = None
    """Whether and how gradients may stand for experts that stay chosen, on their way to other nodes."""
    chains: Chains | None = None
    """Whether and how generations are differences to the one before."""
    allow_missing_experts: bool = False
    """Whether experts of which there is no good copy may begin anew, where nothing whole is left."""

    @property
    def needs(self) -> frozenset[Measurement]:
        """What has to be measured for its plans."""
        return frozenset()

    @property
    def budgets(self) -> Mapping[str, Budget]:
        """By level, what a generation may take of it, where that limits plans."""
        return {}

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Identify the policy; a stored plan is adopted only under an equal one."""

    @abstractmethod
    def least_steps(self, num_operators: int) -> int:
        """Return after how many steps the first generation can be complete, as far as is known before a plan."""

    @abstractmethod
    def due(self, step: int, last: int | None, interval_steps: int) -> bool:
        """Whether a window should start at boundary `step`.

        Args:
            step: the boundary.
            last: where the newest window of this incarnation started.
            interval_steps: of the plan in force.
        """

    @abstractmethod
    def plan(self, inputs: PlanInputs) -> Plan:
        """Plan the next window; from any thread."""

    def refusal(self, operators: OperatorSet) -> str | None:
        """Return why nothing can be planned over these, with what to do instead; `None` if plans are possible."""
        return None

    def remark(self, operators: OperatorSet) -> str | None:
        """Return which of its arguments have no effect over these, and what to do instead; `None` if all have."""
        return None

    def split_nbytes(self, inputs: PlanInputs) -> int:
        """Return the bytes above which operators are cut into pieces before `plan`; 0 cuts none."""
        return 0

    def generations_kept(self, inputs: PlanInputs) -> int:
        """Return how many generations other nodes keep: together they hold every operator, if so many can."""
        return 1

    def copies_kept(self, inputs: PlanInputs) -> int | None:
        """Return how many generations other nodes keep, in slots made for the budget; `None` for those of memory."""
        return None

    def after_restart(self, ledger: TokenLedger, lost_E: Tensor | None) -> TokenLedger:
        """Return what to go on with after a recovery that lost `lost_E` tokens; `None` at a start, or if none was lost."""
        return ledger

    def after_count(self, ledger: TokenLedger) -> TokenLedger:
        """Return what to go on with after more tokens were counted; called before every generation."""
        return ledger


@dataclass(frozen=True, kw_only=True)
class PeriodicPolicy(Policy):
    """A generation of one boundary at multiples of `every_n_steps`, whatever incarnation this is."""

    every_n_steps: int = 1

    @override
    def least_steps(self, num_operators: int) -> int:
        return self.every_n_steps

    @override
    def due(self, step: int, last: int | None, interval_steps: int) -> bool:
        return step % self.every_n_steps == 0


@dataclass(frozen=True, kw_only=True)
class ExpertPolicy(PeriodicPolicy):
    """Takes the dense part, and of every layer the experts that it selects. A restore takes each where it is newest."""

    allow_missing_experts: bool = False

    exact = False

    @override
    def refusal(self, operators: OperatorSet) -> str | None:
        if (operators.whole or operators).layers:  # if the experts of none train, every generation has everything
            return None
        return (
            f"`{self.callback}` takes some experts of every layer, and no Mixture-of-Experts layer was found in the model. "
            "Use DenseCheckpoint, or `register_adapter` if it has layers of a class of its own."
        )

    @property
    @override
    def needs(self) -> frozenset[Measurement]:
        """Tokens decide, and what a restore loses is told in them."""
        return frozenset({"tokens"})

    @abstractmethod
    def select(self, index: int, tables: Sequence[ExpertTable], budgets: Mapping[str, int]) -> Selection:
        """Return the experts that generation `index` takes.

        Args:
            index: generations of this run before this one.
            tables: one per MoE layer, in the order of the model.
            budgets: by level, bytes of experts that one generation may take from one position. Policies that count
                experts and not bytes leave them alone.
        """

    @abstractmethod
    def max_age(self, tables: Sequence[ExpertTable], budgets: Mapping[str, int]) -> int:
        """Return the largest age that an expert reaches of which storage has nothing as new: it is taken then.

        Nodes that keep this many whole generations hold every expert; beside them there is the one being written.
        """

    def in_force(self, inputs: PlanInputs) -> ExpertPolicy:
        """Return the policy that chooses now: with what the run has led to, where arguments alone do not decide."""
        return self

    @override
    def plan(self, inputs: PlanInputs) -> Plan:
        selection = self.in_force(inputs).select(inputs.index, inputs.tables, inputs.budgets)
        return selection.plan(inputs.operators)

    @override
    def generations_kept(self, inputs: PlanInputs) -> int:
        return min(self.in_force(inputs).max_age(inputs.tables, inputs.budgets), MAX_GENERATIONS)
