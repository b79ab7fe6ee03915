"""Take the gradients consumed by an optimizer step: as records, or behind the segment after the step.

An optimizer hook runs right after its step: gradients are still as consumed, clipped and unscaled, and settings are
still the step's, whatever a schedule makes of them next. At the boundary copies of the gradients begin, ahead of the
state; `fence` waits for these copies before gradients are overwritten or freed. A step that began from other weights
than the previous boundary's, or ended in other weights than this boundary's, cannot be repeated: people edit weights in
hooks.

`DifferentialRecorder` is for records whose state only the gradients tell: in case of doubt a boundary is taken whole.
`GradientRecorder` is for copies on other nodes. It may be wrong, since a holder refuses wrong bytes. Gradients sure to
be refused are not offered: gradients changed while they were copied, and gradients of edited weights.

Sources: TierCheck (2026), Sec. 3.2 and 4; MOETION (2024), Sec. 5.2.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import CheckpointError, Corrupt
from lightning_moe_ckpt.native import (
    LANES,
    MAX_PART_NUMEL,
    Copy,
    CopyEngine,
    Ticket,
    compress_gradients,
    decompress_gradient,
    pack_gradient,
    repeats,
)
from lightning_moe_ckpt.operators import StateSchema, memory_of, whole_of, with_memory
from lightning_moe_ckpt.snapshot._filling import versions
from lightning_moe_ckpt.snapshot._lay_out import packed_layout
from lightning_moe_ckpt.snapshot._layout import StateView, StepLayout
from lightning_moe_ckpt.snapshot._shards import PACKED
from lightning_moe_ckpt.snapshot._watched import DataAccess, digested
from lightning_moe_ckpt.tiers import Gradients, PartGradient, StepSettings

log = rank_logger(__name__)

NOT_TRAINED = "the optimizer keeps nothing of it"


@dataclass(frozen=True, slots=True)
class _Consumed:
    gradient: Tensor
    version: int
    """Version of the gradient when it was consumed."""
    settings: StepSettings


def _unchanged(consumed: Collection[_Consumed]) -> bool:
    return versions([each.gradient for each in consumed]) == [each.version for each in consumed]


class _StepRecorder:
    """Follow the steps of one optimizer on some parameters. Used by the training thread."""

    _repeats_kernels = False
    """Whether steps are repeated by the kernel of torch that takes them, where it rounds otherwise than the plain form."""

    def __init__(self, view: StateView, fqns: Iterable[str]) -> None:
        self._view = view
        self._consumed: dict[str, _Consumed] = {}
        self._num_steps, self._edited = 0, False
        self._judged: dict[str, tuple[str, bool, bool]] = {}
        """Options with which steps were found repeatable, by parameter."""
        self._watch(fqns)
        self._hook = view.schema.optimizer.register_step_post_hook(self._stepped)
        hooks = self._hook.hooks_dict_ref()
        assert hooks is not None, "the optimizer keeps its hooks"
        # First of all hooks: their changes to weights, gradients and settings come after the step.
        hooks.move_to_end(self._hook.id, last=False)

    def step_begins(self) -> None:
        """Note whether the coming step begins from the last segment's weights; call before the optimizer steps."""
        self._edited = self._edited or self._now() != self._versions

    def skip(self) -> None:
        """Forget the gradients that led to this boundary; nobody wants them."""
        self._consumed, self._num_steps, self._edited = {}, 0, False

    def close(self) -> None:
        """Stop recording."""
        self._hook.remove()
        self.skip()

    def _watch(self, fqns: Iterable[str]) -> None:
        self._params = {fqn: self._view.params[fqn] for fqn in sorted(fqns)}
        self._watched = with_memory(list(self._params.values()))
        self._versions = self._now()

    def _take(self) -> dict[str, _Consumed] | None:
        """Return the gradients of the step to this boundary; `None` if it does not lead here or they have changed."""
        consumed, leads_here = self._consumed, not self._edited and self._num_steps <= 1
        self.skip()
        if not leads_here or self._now() != self._versions:
            return None
        return consumed if _unchanged(consumed.values()) else None

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._num_steps += 1
        self._versions = self._now()
        if self._num_steps > 1:  # to one boundary: not taken, so their memory is let go
            self._consumed = {}
            return
        if bool(getattr(optimizer, "found_inf", None) or False):  # loss scaling tells a fused kernel to change nothing
            return
        known: dict[tuple[int, torch.dtype, torch.device], tuple[StepSettings, tuple[str, bool, bool]]] = {}
        scaled = getattr(optimizer, "grad_scale", None) is not None
        for fqn, param in self._params.items():
            group = self._view.schema.adam_group(param)
            if param.grad is None or group is None:
                continue
            key = id(group), param.dtype, param.device
            if key not in known:
                kernel, *_ = rounding = _rounding(group, param)
                known[key] = _settings(optimizer, group, kernel if self._repeats_kernels else ""), rounding
            settings, rounding = known[key]
            # A fused kernel rounds the gradients that it unscales only after it has used them.
            self._edited |= rounding != self._judged.get(fqn, rounding) or (scaled and param.dtype is torch.bfloat16)
            self._consumed[fqn] = _Consumed(param.grad, versions([param.grad])[0], settings)

    def _now(self) -> list[int]:
        return versions(self._watched)


class DifferentialRecorder(_StepRecorder):
    """Offer each step's gradients to the view, as sources of DELTA records. With `error_feedback` compression adds what
    it left out of the gradient before; with `digests` shards may change without a trace, and are compared by their
    bytes.
    """

    def __init__(self, view: StateView, *, error_feedback: bool = False, digests: bool = False) -> None:
        self._accesses = DataAccess(whole_of(view.params[fqn]) for fqn in view.repeatable)
        self._compares_bytes = digests
        self._repeats_kernels = view.difference_dtype is torch.float32
        super().__init__(view, view.repeatable)
        groups = {fqn: view.schema.adam_group(param) for fqn, param in self._params.items() if self._repeats_kernels}
        self._judged = {fqn: _rounding(group, self._params[fqn]) for fqn, group in groups.items() if group is not None}
        self._feeds_back = error_feedback
        self._left_out: dict[str, Tensor] = {}
        """Remainders of compression since the last base, by shard."""
        self._taken: list[_Consumed] = []
        self._steps: dict[str, StepSettings] = {}

    def boundary(self) -> bool:
        """Return whether the newest step leads from the previous boundary to this one; call once per boundary."""
        found = self._take()
        consumed = found or {}
        self._view.consumed.clear()
        for fqn, each in consumed.items():
            if each.gradient.layout is torch.strided and each.gradient.dtype is self._params[fqn].dtype:
                self._view.consumed[fqn] = memory_of(each.gradient.detach()).contiguous()
        self._taken = list(consumed.values())
        self._steps = {fqn: each.settings for fqn, each in consumed.items()}
        return found is not None and len(self._view.consumed) == len(consumed)

    def based(self) -> None:
        """Note that the boundary is taken whole: the remainders of compression are void."""
        self._left_out.clear()

    def compress(self, layout: StepLayout) -> StepLayout:
        """Replace the newest step's gradients by compressed ones, for the shards that this rank writes.

        Returns the layout with the bytes of these gradients in the place of the most; `layout` itself on a device,
        which would have to be waited for.

        Source: TierCheck (2026), Sec. 3.2. Without error feedback, as there, a gradient's remainder is lost.
        """
        gradients = self._view.consumed
        table = layout.durable.table
        own = [shard for shard, forms in table.shards if forms[0][0] == PACKED and shard.slice.fqn in gradients]
        flat = [gradients[shard.slice.fqn].view(-1)[shard.slice.start : shard.slice.stop] for shard in own]
        if self._feeds_back:
            flat = [
                each + self._left_out[shard.prefix] if shard.prefix in self._left_out else each
                for shard, each in zip(own, flat, strict=True)
            ]
        compressed = compress_gradients(flat)
        gradients.clear()
        packed: dict[str, list[Tensor]] = {}
        sizes: dict[str, int] = {}
        for shard, each, found in zip(own, flat, compressed, strict=True):
            packed.setdefault(shard.slice.fqn, []).append(pack_gradient(found))
            sizes[shard.prefix] = len(packed[shard.slice.fqn][-1])
            if self._feeds_back:
                self._left_out[shard.prefix] = each - decompress_gradient(found).view(-1)
        gradients.update({fqn: torch.cat(each) for fqn, each in packed.items()})
        return layout if any(each.is_cuda for each in flat) else packed_layout(layout, sizes)

    def settings(self) -> dict[str, Any]:
        """Return the newest step's settings for its boundary's journal, to be read by `step_settings`."""
        known = Counter(self._steps.get(fqn) for fqn in self._params)
        numbered = {each: index for index, (each, _) in enumerate(known.most_common())}
        others = {fqn: index for fqn in self._params if (index := numbered[self._steps.get(fqn)])}
        return {"settings": [None if each is None else each.described() for each in numbered], "others": others}

    def sealed(self) -> bool:
        """Return whether the state is still as the step left it; call when the boundary is sealed."""
        before, self._versions = self._versions, self._now()
        return before == self._versions

    def release(self) -> bool:
        """Let go of the copied gradients; return whether they are still as consumed."""
        taken, self._taken = self._taken, []
        self._view.consumed.clear()
        return _unchanged(taken)

    @override
    def close(self) -> None:
        super().close()
        self._accesses.close()

    @override
    def _now(self) -> list[int]:
        """Return versions, and digests if need be, of weights and state: a step is repeated on all state."""
        params = list(self._params.values())
        tensors = [*params, *self._view.schema.watch(params).tensors]
        found = [*versions(with_memory(tensors)), self._accesses.count]
        if self._compares_bytes:
            shards = {str(at): memory_of(each) for at, each in enumerate(tensors) if isinstance(each, DTensor)}
            found += [int(digest, 16) for digest in digested(shards).values()]
        return found


class GradientRecorder(_StepRecorder):
    """Record the gradients of steps behind segments, from a parameter's first segment with a place for them on."""

    def __init__(self, view: StateView, engine: CopyEngine) -> None:
        assert view.gradient_dtype is not None
        super().__init__(view, ())
        self._engine, self._dtype = engine, view.gradient_dtype
        self._record: RecordedStep | None = None

    def start(self, layout: StepLayout, slot_U8: Tensor | None) -> RecordedStep | None:
        """Begin to copy this boundary's gradients behind its segment in the slot (`None` if nobody wants them); `None`
        if the step cannot be repeated.
        """
        consumed, known = self._take(), self._params.keys()
        if not known >= (fqns := {place.shard.slice.fqn for place in layout.gradients}):
            self._watch(known | fqns)
        if consumed is None or slot_U8 is None:
            return None
        area_U8 = slot_U8[layout.gradients_at : layout.nbytes]
        parts: dict[str, PartGradient] = {}
        copies: list[Copy] = []
        for place in layout.gradients:
            piece, end = place.shard.slice, place.offset + place.shard.slice.numel * self._dtype.itemsize
            found = consumed.get(piece.fqn)
            if piece.fqn not in known:  # sent whole: whether it was stepped nobody saw
                continue
            if found is not None:
                if (flat := _flat(memory_of(found.gradient))) is None:
                    continue
                copies.append((flat[piece.start : piece.stop], area_U8[place.offset : end].view(self._dtype)))
            parts[place.shard.prefix] = PartGradient(place.offset, None if found is None else found.settings)
        ticket = self._engine.submit(self._engine.prepare(copies))
        self._record = RecordedStep(Gradients(area_U8, self._dtype, parts), ticket, list(consumed.values()))
        return self._record

    def sealed(self) -> None:
        """Compare the weights with those after the step; call when the boundary's segment has taken them."""
        if (now := self._now()) != self._versions and self._record is not None:
            self._record.drop()
        self._versions = now

    def fence(self) -> None:
        """Wait for the copies; call before gradients are overwritten or freed."""
        self._consumed = {}  # of a boundary that was not taken
        record, self._record = self._record, None
        if record is not None:
            record.release(self._engine)

    def wait(self) -> None:
        """Wait until all copies have ended."""
        record, self._record = self._record, None
        if record is not None:
            record.gradients()


class RecordedStep:
    """Gradients of one optimizer step, on their way from `sources` to memory behind a segment."""

    def __init__(self, gradients: Gradients, ticket: Ticket, sources: Sequence[_Consumed]) -> None:
        self._lock = threading.Lock()
        self._gradients: Gradients | None = gradients
        self._ticket, self._sources = ticket, sources

    def gradients(self) -> Gradients | None:
        """Wait for the copies and return the gradients; `None` if a copy failed or a source changed meanwhile."""
        self._end(self._ticket.wait)
        return self._gradients

    def release(self, engine: CopyEngine) -> None:
        """Wait for the copies and let go of the sources, which may change from here on."""
        self._end(lambda: engine.fence(self._ticket))

    def drop(self) -> None:
        """Return no gradients from here on: they lead to other weights."""
        with self._lock:
            self._gradients, self._sources = None, ()

    def _end(self, wait: Callable[[], object]) -> None:
        try:
            wait()
        except CheckpointError:
            self.drop()
        with self._lock:
            if not _unchanged(self._sources):
                self._gradients = None
            self._sources = ()


def step_settings(journal: Mapping[str, Any], fqn: str) -> StepSettings | None:
    """Return the settings of the step to a boundary from its journal; `None` if the step did not change the parameter.
    Raises `Corrupt` if the journal lacks the settings.
    """
    try:
        taken = journal["outcome"]["consumed"]
        settings = taken["settings"][taken["others"].get(fqn, 0)]
        return None if settings is None else StepSettings(**settings)
    except (LookupError, TypeError, AttributeError) as error:
        raise Corrupt(
            f"The journal does not say how `{fqn}` was stepped ({error!r}). An older state is good."
        ) from error


def repeatable(view: StateView, *, exact: bool) -> tuple[frozenset[str], dict[str, str]]:
    """Return the parameters whose steps can be repeated from gradients, and the reasons against all others, by name.

    To the last bit (`exact`): parameters of torch's own Adam and AdamW, in float32 or bfloat16, whose kernel passes a
    probe. Except for rounding: parameters of any Adam in float32.
    """
    whys = {fqn: _why_not_repeatable(view, fqn, exact=exact) for fqn in view.params}
    return frozenset(fqn for fqn, why in whys.items() if not why), {fqn: why for fqn, why in whys.items() if why}


def _why_not_repeatable(view: StateView, fqn: str, *, exact: bool) -> str:
    param, optimizer = view.params[fqn], view.schema.optimizer
    if (group := view.schema.adam_group(param)) is None:
        return f"the optimizer is {type(optimizer).__name__}" if view.schema.entries(param) else NOT_TRAINED
    narrow = f"they are {str(param.dtype).removeprefix('torch.')}, and not float32"
    (kernel, _, is_odd), is_wide = _rounding(group, param), param.dtype is torch.float32
    reasons = {
        f"{type(optimizer).__name__} may round otherwise than torch's Adam and AdamW": type(optimizer)
        not in (Adam, AdamW),
        narrow: not (is_wide or param.dtype is torch.bfloat16),
        "a learning rate that is a tensor, `capturable` and `differentiable` round otherwise": is_odd,
        "Adam's weight decay rounds bfloat16 by the place in memory": not (
            is_wide or group["fused"] or _is_decoupled(optimizer, group)
        ),
        f"`{kernel}` rounds the last elements of shards otherwise, and what {LANES} does not divide": kernel != ""
        and (fqn in view.boxes or param.numel() % LANES != 0),
    }
    if not exact and param.numel() > MAX_PART_NUMEL:
        return f"they have more than {MAX_PART_NUMEL} elements"
    if not exact:
        return "" if view.keeps_gradient(fqn) else narrow
    if why := next((why for why, holds in reasons.items() if holds), ""):
        return why
    took, repeat = (kernel, kernel) if kernel else ("cpu foreach", "cpu plain")
    alike = not (kernel or group["foreach"]) or repeats(repeat, took, param.dtype)
    return "" if alike else f"the kernel of their steps (`{took}`) is not repeated by this build of torch"


def kernel_of(group: Mapping[str, Any], param: Tensor) -> str:
    """Return the kernel of torch that has to repeat steps of a parameter, see `AdamStep`; empty for compiled code."""
    if (foreach := group["foreach"]) is None and not group["fused"]:
        foreach = param.is_cuda  # as torch chooses
    form = "fused" if group["fused"] else "foreach" if foreach else "plain"
    plain = param.device.type == "cpu" and param.dtype is torch.float32 and form != "fused"
    return "" if plain else f"{param.device.type} {form}"


def _rounding(group: Mapping[str, Any], param: Tensor) -> tuple[str, bool, bool]:
    """Return the options by which a step is judged; with others it may round otherwise."""
    is_odd = any(map(torch.is_tensor, (group["lr"], *group["betas"]))) or group["capturable"] or group["differentiable"]
    return kernel_of(group, param), bool(group["foreach"]), bool(is_odd)


def _is_decoupled(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    # Since torch 2.7 AdamW is a kind of Adam with this entry; before, only its class says it.
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))


def log_whole(whole: Mapping[str, str], number: int) -> None:
    """Log, once per process, the parameters that differentials have whole, and why."""
    by_reason: dict[str, list[str]] = {}
    for fqn, why in whole.items():
        by_reason.setdefault(why, []).append(fqn)
    by_reason.pop(NOT_TRAINED, None)
    for why, fqns in by_reason.items():
        log.log(
            logging.WARNING if len(fqns) == number else logging.INFO,
            "%d of %d parameters are stored whole at every step, since their steps cannot be repeated as they were from "
            "gradients: %s (first %s). What is restored of them is exact all the same.",
            *(len(fqns), number, why, fqns[0]),
        )


def why_no_deltas(view: StateView, *, every_n_steps: int, exact: bool) -> str | None:
    """Return why other nodes cannot repeat optimizer steps, to the last bit if `exact`; `None` if they can."""
    if every_n_steps > 1:
        return (
            f"generations are {every_n_steps} steps apart: the gradients of all of them are hardly less than the state"
        )
    schema: StateSchema = view.schema
    if not (kept := [fqn for fqn in view.params if view.keeps_gradient(fqn)]):
        return f"{type(schema.optimizer).__name__} is not Adam or AdamW, or nothing is trained in float32"
    groups = [group for fqn in kept if (group := schema.adam_group(view.params[fqn])) is not None]
    on_cpu = all(view.params[fqn].device.type == "cpu" for fqn in kept)
    if exact and any(group["fused"] or (group["foreach"] and on_cpu) for group in groups):
        return "an optimizer with fused=True or foreach=True rounds otherwise than its plain form, which is repeated"
    return None


def _settings(optimizer: Optimizer, group: Mapping[str, Any], kernel: str) -> StepSettings:
    beta1, beta2 = group["betas"]
    return StepSettings(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=_is_decoupled(optimizer, group),
        maximize=bool(group["maximize"]),
        kernel=kernel,
    )


def _flat(gradient: Tensor) -> Tensor | None:
    """Return the elements in order, without a copy; `None` unless float32, dense and contiguous."""
    if gradient.layout is not torch.strided or gradient.dtype is not torch.float32 or not gradient.is_contiguous():
        return None
    return gradient.detach().view(-1)
