"""Keep the gradients that an optimizer step consumes of the experts behind the segment that it leads to.

A hook of the optimizer runs right after its step: gradients are then as they were consumed, clipped and unscaled, and
settings are those that the step had, whatever a schedule makes of them next. At the boundary they begin to be copied
into the slot of the segment, ahead of the state; `fence` waits for that before gradients are overwritten or let go of.

None of this has to be right for copies to be right: a holder refuses what leads it to other bytes. What is certain to
do so is not offered. So gradients that somebody changed while they were copied are dropped, and so is a step that began
from other weights than the segment before it has, or ended in others than this one has: people edit weights in hooks.

Source: MOETION (2024), Sec. 5.2.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native import Copy, CopyEngine, Ticket
from lightning_moe_ckpt.operators import StateSchema
from lightning_moe_ckpt.snapshot._layout import StateView, StepLayout
from lightning_moe_ckpt.snapshot._writer import versions
from lightning_moe_ckpt.tiers import Gradients, PartGradient, StepSettings


@dataclass(frozen=True, slots=True)
class _Consumed:
    gradient: Tensor
    version: int
    """Version of the gradient when it was consumed."""
    settings: StepSettings


class GradientRecorder:
    """Record the steps of one optimizer. Used by the training thread."""

    def __init__(self, view: StateView, engine: CopyEngine) -> None:
        assert view.gradient_dtype is not None
        self._view, self._engine, self._dtype = view, engine, view.gradient_dtype
        names = {piece.fqn for op in view.operators if op.kind == "expert" for piece in op.slices}
        self._params = {fqn: view.params[fqn] for fqn in sorted(names) if view.keeps_gradient(fqn)}
        self._consumed: dict[str, _Consumed] = {}
        self._num_steps, self._edited = 0, False
        self._versions = self._now()
        self._record: RecordedStep | None = None
        self._hook = view.schema.optimizer.register_step_post_hook(self._stepped)

    def step_begins(self) -> None:
        """Note whether the coming step begins from the weights of the last segment; call before the optimizer steps."""
        self._edited = self._edited or self._now() != self._versions

    def start(self, layout: StepLayout, slot_U8: Tensor) -> RecordedStep | None:
        """Begin to copy the gradients that led to this boundary; `None` if they would lead nobody here.

        Args:
            layout: layout of the slot.
            slot_U8: memory of the slot, with room behind the segment.
        """
        consumed, self._consumed = self._consumed, {}
        edited, self._edited = self._edited, False
        num_steps, self._num_steps = self._num_steps, 0
        if edited or num_steps > 1 or self._now() != self._versions:
            return None
        area_U8 = slot_U8[layout.gradients_at : layout.nbytes]
        parts: dict[str, PartGradient] = {}
        copies: list[Copy] = []
        for place in layout.gradients:
            piece, end = place.part.piece, place.offset + place.part.piece.numel * self._dtype.itemsize
            found = consumed.get(piece.fqn)
            if found is not None:
                flat = _flat(found.gradient)
                if flat is None:
                    continue
                copies.append((flat[piece.start : piece.stop], area_U8[place.offset : end].view(self._dtype)))
            parts[place.part.prefix] = PartGradient(place.offset, None if found is None else found.settings)
        ticket = self._engine.submit(self._engine.prepare(copies))
        self._record = RecordedStep(Gradients(area_U8, self._dtype, parts), ticket, list(consumed.values()))
        return self._record

    def skip(self) -> None:
        """Forget the gradients that led to this boundary, which nobody wants."""
        self._consumed, self._num_steps, self._edited = {}, 0, False

    def sealed(self) -> None:
        """Compare the weights with those after the step; call when the segment of the boundary has taken them."""
        now = self._now()
        if now != self._versions and self._record is not None:
            self._record.drop()
        self._versions = now

    def fence(self) -> None:
        """Wait for the copies; call before gradients are overwritten or let go of."""
        self._consumed = {}  # of a boundary that was not taken
        record, self._record = self._record, None
        if record is not None:
            record.release(self._engine)

    def wait(self) -> None:
        """Wait until nothing is copied any more."""
        record, self._record = self._record, None
        if record is not None:
            record.gradients()

    def close(self) -> None:
        """Stop to record."""
        self._hook.remove()
        self.skip()

    # -- private

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._num_steps += 1
        self._versions = self._now()
        settings: dict[int, StepSettings] = {}
        for fqn, param in self._params.items():
            group = self._view.schema.adam_group(param)
            if param.grad is None or group is None:
                continue
            if id(group) not in settings:
                settings[id(group)] = _settings(optimizer, group)
            self._consumed[fqn] = _Consumed(param.grad, versions([param.grad])[0], settings[id(group)])

    def _now(self) -> list[int]:
        return versions(list(self._params.values()))


class RecordedStep:
    """Gradients of one optimizer step, on their way behind a segment; `sources` are copied, as they were consumed."""

    def __init__(self, gradients: Gradients, ticket: Ticket, sources: Sequence[_Consumed]) -> None:
        self._lock = threading.Lock()
        self._gradients: Gradients | None = gradients
        self._ticket, self._sources = ticket, sources

    def gradients(self) -> Gradients | None:
        """Wait for the copies and return the gradients; `None` if a copy failed or a source changed meanwhile."""
        try:
            self._ticket.wait()
        except CheckpointError:
            self.drop()
        self._decide()
        return self._gradients

    def release(self, engine: CopyEngine) -> None:
        """Let go of the sources, which may change from here on."""
        try:
            engine.fence(self._ticket)
        except CheckpointError:
            self.drop()
        self._decide()

    def drop(self) -> None:
        """Give none: they lead to other weights."""
        with self._lock:
            self._gradients, self._sources = None, ()

    def _decide(self) -> None:
        with self._lock:
            if versions([each.gradient for each in self._sources]) != [each.version for each in self._sources]:
                self._gradients = None
            self._sources = ()


def why_no_deltas(view: StateView, *, every_n_steps: int, exact: bool) -> str | None:
    """Return why steps of the optimizer cannot be repeated on other nodes; `None` if they can.

    Args:
        view: live state.
        every_n_steps: from one generation to the next.
        exact: whether they must be repeated to the last bit.
    """
    if every_n_steps > 1:
        return (
            f"generations are {every_n_steps} steps apart: the gradients of all of them are hardly less than the state"
        )
    schema: StateSchema = view.schema
    fqns = {piece.fqn for op in view.operators if op.kind == "expert" for piece in op.slices}
    kept = [fqn for fqn in fqns if view.keeps_gradient(fqn)]
    if not kept:
        return f"{type(schema.optimizer).__name__} is not Adam or AdamW, or no expert is trained in float32"
    groups = [group for fqn in kept if (group := schema.adam_group(view.params[fqn])) is not None]
    on_cpu = all(view.params[fqn].device.type == "cpu" for fqn in kept)
    if exact and any(group["fused"] or (group["foreach"] and on_cpu) for group in groups):
        return "an optimizer with fused=True or foreach=True rounds otherwise than its plain form, which is repeated"
    return None


def _settings(optimizer: Optimizer, group: Mapping[str, Any]) -> StepSettings:
    beta1, beta2 = group["betas"]
    return StepSettings(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        # AdamW has been a kind of Adam since torch 2.7 and says so here; before that its class says it.
        decoupled=bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW))),
        maximize=bool(group["maximize"]),
    )


def _flat(gradient: Tensor) -> Tensor | None:
    """Return the elements in order, without a copy; `None` if they are not in order or not all there."""
    if gradient.layout is not torch.strided or gradient.dtype is not torch.float32 or not gradient.is_contiguous():
        return None
    return gradient.detach().view(-1)
