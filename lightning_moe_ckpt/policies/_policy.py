"""The contract of a policy, and the inputs of its plans.

A policy is data and pure functions. All ranks give it equal inputs, so all get the same plan without an exchange. The
policy declares its measurements in `needs` and `budgets`; the planner measures, agrees with the other ranks, and lays
plans out. All differences between policies are declared here: no other code asks which policy runs.

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
from lightning_moe_ckpt.policies._windows import all_names

# Shape suffix: E experts of all layers.

Measurement = Literal["tokens", "popularity", "bandwidths", "compute_dtypes"]
"""Measurable inputs: tokens that each expert has learned from and every tier has saved; popularity of experts; bytes
that steps can hide, from their time and from bandwidths; precisions in which parameters are consumed."""

DifferentialMode = Literal["lossless", "bf16", "compressed"]
"""Gradients as the optimizer consumed them, rounded to bfloat16, or compressed: INT8 for small gradients, else the
largest hundredth of the elements."""

Budget = int | Literal["auto"]
"""Bytes per rank and generation, or `auto` for as many as steps can hide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deltas:
    """Gradients sent to other nodes in place of the states that they lead to."""

    kind: Literal["lossless", "bf16"] = "lossless"
    """Form of gradients: exact, for copies equal to their owner's bytes, or rounded to bfloat16."""
    resync_every: int = 64
    """Generations of rounded gradients until a whole state is sent with them, and the difference is logged."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of gradients as kept and sent."""
        return torch.float32 if self.kind == "lossless" else torch.bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class Chains:
    """Differences between two full generations, from one step to the next (TierCheck, Sec. 3.2)."""

    every_n_steps: int
    """Most steps from one full generation, a *base*, to the next."""
    batch: int
    """Differences that storage gets together, in one generation."""
    mode: DifferentialMode = "lossless"
    """Form of gradients."""
    error_feedback: bool = False
    """Whether a gradient's compression loss is added to the next gradient."""

    def links_kept(self, generations: int) -> int:
        """Return the differences that memory has room for: a batch on its way to storage, the newest two, and, with more than two
        generations, a batch being gathered.
        """
        return min(self.every_n_steps - 1, self.batch * min(generations - 1, 2)) + 2

    def ends_batch(self, steps: int) -> bool:
        """Return whether the difference `steps` steps after its base is the last of a batch."""
        return steps % self.batch == 0 or steps + 1 >= self.every_n_steps


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """Inputs of a plan; all that decide anything are equal on all ranks."""

    operators: OperatorSet
    """Operators of this rank, cut into pieces if the policy asked for pieces."""
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes that this rank writes of each operator's FULL and COMPUTE record."""
    popularity: Sequence[float] = ()
    """Popularity per expert, over all ranks; zeros if not measured."""
    budgets: Mapping[str, int] = field(default_factory=dict)
    """Smallest budget of all ranks per level: bytes of a step, or of one position's experts for partial generations."""
    index: int = 0
    """Generations of this run before this one."""
    ledger: TokenLedger | None = None
    """Ledger of saved tokens, if tokens are counted."""
    coming: Tensor | None = None
    """int64 `[E]`: expected tokens of each expert until the plan is carried out, if known."""
    layouts: Sequence[ExpertLayout] = ()
    """Layouts of the ledger's experts."""
    bad: Collection[int] = ()
    """Experts with a bad stored copy, by place over all layers, to be taken first."""
    deltas: Deltas | None = None
    """Settings of gradients in force on the way to other nodes; `None` where states are sent."""
    made_for: Mapping[str, int] = field(default_factory=dict)
    """Budgets that memory was made for; empty before the first plan."""

    @cached_property
    def tables(self) -> list[ExpertTable]:
        """The ledger by layer."""
        assert self.ledger is not None
        return self.ledger.tables(self.layouts, self.bad, self.coming)


class Policy(ABC):
    """Contract of a policy. The defaults fit a policy of dense generations, each with everything."""

    kind: ClassVar[str]
    """Name of the policy in markers."""
    cuts: ClassVar[bool] = True
    """Whether parts of one state may be restored from different steps: an optimizer must then update each element alone."""
    exact: ClassVar[bool] = True
    """Whether a generation has everything as of one step, so that restores are exact. Else its plans are partial."""
    replays: ClassVar[bool] = False
    """Whether a restart repeats steps of the run before."""
    callback: ClassVar[str] = ""
    """Name of the user's callback in messages."""
    peer_audiences: ClassVar[frozenset[Audience]] = frozenset(AUDIENCES)
    """Files in copies on other nodes."""
    popularity: Popularity | None = None
    """Settings of popularity, if needed."""
    deltas: Deltas | None = None
    """Settings of gradients in place of states on the way to other nodes; `None` sends states."""
    chains: Chains | None = None
    """Settings of differences between generations; `None` takes none."""
    allow_missing_experts: bool = False
    """Whether experts without a good copy may begin anew, if no whole generation is left."""

    @property
    def needs(self) -> frozenset[Measurement]:
        """Measurements for the policy's plans; bandwidths if budgets depend on them."""
        return frozenset({"bandwidths"} if "auto" in self.budgets.values() else ())

    @property
    def budgets(self) -> Mapping[str, Budget]:
        """Budgets that limit plans, by level."""
        return {}

    @property
    def bound(self) -> str:
        """The user's bound on steps between generations, such as `every_n_steps=1`; empty where cost may stretch a default."""
        return ""

    def config(self) -> dict[str, Any]:
        """Return what identifies the policy, as JSON values; a stored plan is adopted only under an equal policy. What does not change
        the form of a stored generation is left out, such as its period.
        """
        return {"kind": self.kind}

    @abstractmethod
    def least_steps(self, num_operators: int) -> int:
        """Return the least steps to the first complete generation, as far as known before a plan."""

    @abstractmethod
    def due(self, step: int, last: int | None, interval_steps: int) -> bool:
        """Return whether a window should start at boundary `step`, after this incarnation's newest window at `last`, if any."""

    def plan(self, inputs: PlanInputs) -> Plan:
        """Plan the next window; from any thread. Here one step takes everything; of a base and its differences this is the base's plan."""
        return Plan.of_everything(all_names(inputs.operators))

    def refusal(self, operators: OperatorSet) -> str | None:
        """Return why no plan over these operators is possible, with a remedy; `None` if plans are possible."""
        return None

    def remark(self, operators: OperatorSet) -> str | None:
        """Return which arguments have no effect over these operators, with a remedy; `None` if all have."""
        return None

    def split_nbytes(self, inputs: PlanInputs) -> int:
        """Return the bytes above which operators are cut into pieces before `plan`; 0 cuts none."""
        return 0

    def generations_kept(self, inputs: PlanInputs) -> int:
        """Return the number of generations that other nodes keep: together they hold every operator, if possible."""
        return 1

    def copies_kept(self, inputs: PlanInputs) -> int | None:
        """Return the number of generations that other nodes keep in budget slots; `None` for slots like memory's."""
        return None

    def after_restart(self, ledger: TokenLedger, lost_E: Tensor | None) -> TokenLedger:
        """Return the ledger after a recovery that lost `lost_E` tokens; `None` at a start, or if none was lost."""
        return ledger

    def after_count(self, ledger: TokenLedger) -> TokenLedger:
        """Return the ledger to go on with after more tokens were counted; called before every generation."""
        return ledger


@dataclass(frozen=True, kw_only=True)
class PeriodicPolicy(Policy):
    """A generation of one boundary at multiples of `every_n_steps`, in every incarnation."""

    every_n_steps: int | None = None
    """The user's period; `None` for the default."""
    default_steps: ClassVar[int] = 1

    @property
    def period(self) -> int:
        """Steps from one generation to the next."""
        return self.every_n_steps or self.default_steps

    @property
    @override
    def bound(self) -> str:
        return f"every_n_steps={self.every_n_steps}" if self.every_n_steps else ""

    @override
    def least_steps(self, num_operators: int) -> int:
        return self.period

    @override
    def due(self, step: int, last: int | None, interval_steps: int) -> bool:
        # Memory may have had no room at its turn.
        overdue = self.bound and last is not None and step - last >= self.period
        return bool(overdue) or step % self.period == 0


@dataclass(frozen=True, kw_only=True)
class ExpertPolicy(PeriodicPolicy):
    """Take the dense part, and selected experts of every layer. A restore takes each expert's newest copy."""

    allow_missing_experts: bool = False

    exact = False

    @override
    def refusal(self, operators: OperatorSet) -> str | None:
        if (operators.whole or operators).layers:  # without trained experts every generation has everything
            return None
        return (
            f"`{self.callback}` takes some experts of every layer, and no Mixture-of-Experts layer was found in the model. "
            "Use DenseCheckpoint, or `register_adapter` if it has layers of a class of its own."
        )

    @property
    @override
    def needs(self) -> frozenset[Measurement]:
        """Also tokens, by which experts are chosen and losses are reported."""
        return super().needs | {"tokens"}

    @abstractmethod
    def select(self, index: int, tables: Sequence[ExpertTable], budgets: Mapping[str, int]) -> Selection:
        """Return the experts that generation `index` of this run takes. Tables are one per MoE layer, in the order of
        the model; budgets, by level, bytes of experts that one generation may take from one position. Policies that
        count experts ignore them.
        """

    @abstractmethod
    def max_age(self, tables: Sequence[ExpertTable], budgets: Mapping[str, int]) -> int:
        """Return the largest age of an expert without an equally new copy in storage: the expert is taken at that age.

        Nodes that keep this many whole generations hold every expert; beside them there is the one being written.
        """

    def in_force(self, inputs: PlanInputs) -> ExpertPolicy:
        """Return the policy that chooses now: with settings changed by the run, beyond the user's arguments."""
        return self

    @override
    def plan(self, inputs: PlanInputs) -> Plan:
        return self.in_force(inputs).select(inputs.index, inputs.tables, inputs.budgets).plan(inputs.operators)

    @override
    def generations_kept(self, inputs: PlanInputs) -> int:
        return min(self.in_force(inputs).max_age(inputs.tables, inputs.budgets), MAX_GENERATIONS)
