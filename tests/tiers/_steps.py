"""Segments of a real optimizer at boundaries that follow each other, with what the step between them consumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from door import Baseline, DeltaDecoder, EncodedDelta
from torch import Tensor

from lightning_moe_ckpt.storage import SegmentLayout, TensorSpec
from lightning_moe_ckpt.tiers import Gradients, PartGradient, StepSettings, aligned_gradient, gradient_nbytes

JOURNAL_NBYTES = 700


def prefix_of(expert: int, numel: int) -> str:
    """As session spells it."""
    return f"full/layers.0.experts.{expert}.w/0+{numel}"


@dataclass(kw_only=True)
class Training:
    """Some experts with one parameter each, a dense parameter, and an optimizer over all."""

    sizes: Sequence[int]
    """Elements of each expert."""
    decoupled: bool = True
    amsgrad: bool = False
    maximize: bool = False
    weight_decay: float = 0.0
    averages: bool = False
    """Whether each part has an average besides."""
    dtype: torch.dtype = torch.float32
    """Of gradients as they travel."""
    seed: int = 0
    step: int = 0
    lr: float = 1e-2
    used: dict[int, PartGradient] = field(default_factory=dict)
    """By expert, in the latest step."""

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.experts = [torch.nn.Parameter(torch.randn(size, generator=self.random)) for size in self.sizes]
        self.dense = torch.nn.Parameter(torch.randn(37, generator=self.random))
        self.extra = [torch.randn(size, generator=self.random) for size in self.sizes]
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        self.optimizer = kind(
            [*self.experts, self.dense], amsgrad=self.amsgrad, maximize=self.maximize,
            weight_decay=self.weight_decay, betas=(0.9, 0.98), eps=1e-7, foreach=False,
        )  # fmt: skip
        self.area = torch.zeros(sum(gradient_nbytes(size, self.dtype) for size in self.sizes), dtype=torch.uint8)

    def slot_nbytes(self, segment: Tensor) -> int:
        """Of a segment with the gradients behind it."""
        return aligned_gradient(segment.numel()) + self.area.numel()

    def take_step(self, routed: Sequence[int]) -> None:
        """One step, in which only some experts get a gradient; with a schedule."""
        self.step += 1
        self.lr = 1e-2 / self.step
        self.optimizer.param_groups[0]["lr"] = self.lr
        settings = StepSettings(self.lr, 0.9, 0.98, 1e-7, self.weight_decay, self.decoupled, self.maximize)
        self.area, offset = torch.zeros_like(self.area), 0
        self.used.clear()
        for expert, (param, size) in enumerate(zip(self.experts, self.sizes, strict=True)):
            param.grad = None
            self.used[expert] = PartGradient(offset, None)
            if expert in routed:
                param.grad = torch.randn(size, generator=self.random) * 10.0 ** -(self.step % 9)
                place = self.area[offset : offset + size * self.dtype.itemsize].view(self.dtype)
                place.copy_(param.grad)
                self.used[expert] = PartGradient(offset, settings)
            offset += gradient_nbytes(size, self.dtype)
        self.dense.grad = torch.randn(37, generator=self.random)
        self.optimizer.step()
        for average, param in zip(self.extra, self.experts, strict=True):
            average.lerp_(param.detach(), 0.1)

    def layout(self, experts: Sequence[int]) -> SegmentLayout:
        """Of a segment that has these experts."""
        state = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self.amsgrad else [])]
        specs = [TensorSpec("full/dense/0+37/present", torch.uint8, (1,))]
        specs += [TensorSpec(f"full/dense/0+37/{key}", torch.float32, (37,)) for key in ("param", *state)]
        specs += [TensorSpec("full/dense/0+37/step", torch.float32, (1,))]
        specs += [TensorSpec("buffer/seen", torch.int64, (3,)), TensorSpec("buffer/none", torch.float32, (0,))]
        for expert in experts:
            size = self.sizes[expert]
            prefix = prefix_of(expert, size)
            specs += [
                TensorSpec(f"{prefix}/present", torch.uint8, (1,)), TensorSpec(f"{prefix}/param", torch.float32, (size,)),
                TensorSpec(f"{prefix}/step", torch.float32, (1,)),
                *(TensorSpec(f"{prefix}/{key}", torch.float32, (size,)) for key in state),
                *([TensorSpec(f"{prefix}/average", torch.float32, (size,))] if self.averages else []),
            ]  # fmt: skip
        specs += [TensorSpec("journal", torch.uint8, (JOURNAL_NBYTES,))]
        return SegmentLayout(specs, metadata={"format": "test"})

    def segment(self, experts: Sequence[int]) -> Tensor:
        """All bytes of now, uint8; what is not there yet is zero."""
        layout = self.layout(experts)
        out = torch.zeros(layout.nbytes, dtype=torch.uint8)
        layout.write_header(out)
        for name in layout.spans:
            place = layout.view(out, name)
            value = self._value(name)
            if value is not None:
                place.copy_(value.detach().reshape(place.shape))
        return out

    def _value(self, name: str) -> Tensor | None:
        prefix, _, key = name.rpartition("/")
        if not prefix.startswith("full/"):
            return torch.randint(0, 100, (JOURNAL_NBYTES,), generator=self.random) if name == "journal" else None
        fqn = prefix.split("/")[1]
        expert = None if fqn == "dense" else int(fqn.split(".")[3])
        param = self.dense if expert is None else self.experts[expert]
        state: Mapping[str, Tensor] = self.optimizer.state.get(param, {})
        if key == "present":
            return torch.tensor([int(bool(state))], dtype=torch.uint8)
        if key == "average":
            return None if expert is None else self.extra[expert]
        return param if key == "param" else state.get(key)

    def gradients(self) -> Gradients:
        """Of the latest step."""
        return Gradients(
            self.area, self.dtype, {prefix_of(expert, self.sizes[expert]): part for expert, part in self.used.items()}
        )


def decode(encoded: EncodedDelta, base: Tensor, nbytes: int, chunk: int = 1000) -> Tensor:
    """What a receiver makes of it, whose memory is as large as the sender's, and dirty; the payload comes in chunks."""
    decoder = DeltaDecoder(encoded.recipe, base, torch.full((nbytes,), 0xA5, dtype=torch.uint8))
    feed(decoder, encoded.payload, chunk)
    assert decoder.whole
    return decoder.segment


def feed(decoder: DeltaDecoder, payload: Sequence[Tensor], chunk: int) -> None:
    """The payload, view by view, in chunks."""
    offset = 0
    for view in payload:
        for part in torch.split(view, chunk):
            decoder.place(offset, part.numel()).copy_(part)
            decoder.arrived(part.numel())
            offset += part.numel()


def baseline(segment: Tensor) -> Baseline:
    """What the sender keeps of it."""
    return Baseline.of(segment)


OPTIMIZERS: list[dict[str, Any]] = [
    {"decoupled": decoupled, "amsgrad": amsgrad, "maximize": maximize, "weight_decay": decay}
    for decoupled in (True, False)
    for amsgrad in (False, True)
    for maximize in (False, True)
    for decay in (0.0, 0.1)
]
