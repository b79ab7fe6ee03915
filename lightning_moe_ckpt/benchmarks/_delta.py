"""What a copy on another node costs when it is told by gradients: bytes against the segment, and time to rebuild it.

Experts are trained for real, by AdamW with a schedule, and each step makes a segment of those that are chosen. One holder
is sent each of them as a delta of the one before and rebuilds it. Bytes are those on the wire, with everything that
describes them, markers and headers of messages included, against those of the whole segment and its marker. With float32 gradients the copy must have its owner's bits; with bfloat16 the
difference is shown, which grows from step to step and begins anew for experts that are chosen anew.

Source: MOETION (2024), Sec. 5.2 (asynchronous optimizer recomputation; it reports a fifth of the bytes).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import Benchmark, Progress, megabytes, milliseconds, positive, table_of
from lightning_moe_ckpt.storage import (
    GenerationId,
    RankMarker,
    RecordEntry,
    RecordRows,
    SegmentEntry,
    SegmentLayout,
    Span,
    TensorSpec,
    digest_of,
    dtype_code,
    segment_key,
)
from lightning_moe_ckpt.tiers import (
    DEFAULT_MAX_CHUNK,
    Baseline,
    DeltaDecoder,
    Gradients,
    PartGradient,
    StepSettings,
    aligned_gradient,
    encode_delta,
    gradient_nbytes,
)
from lightning_moe_ckpt.tiers._peer_wire import MESSAGE_NBYTES
from lightning_moe_ckpt.tiers._squeeze import squeeze

_DIM, _HIDDEN, _ROWS = 128, 512, 32
_EXPERTS, _CHOSEN = 8, 4
_PERIODS = (0, 10, 3)
"""Steps after which other experts are chosen; 0 for never."""
_BETAS, _EPS, _WEIGHT_DECAY = (0.9, 0.95), 1e-8, 0.1
_STATE = ("param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaFigure:
    """One precision of gradients, with one stability of the selection."""

    gradients: str
    """`float32` or `bfloat16`."""
    period: int
    """Steps after which other experts are chosen; 0 for never."""
    steps: int
    segment_nbytes: float
    """Of a whole segment."""
    share: float
    """Bytes on the wire against those of whole segments, both with all that goes with them; mean over steps but the first."""
    equal: bool
    """Whether every copy had its owner's bits."""
    param_difference: float
    """Largest difference of a weight relative to the largest weight of its matrix, at the worst step."""
    moment_difference: float
    """The same of the moments."""
    rebuild_seconds: float
    """To rebuild a segment on the holder, on one thread, median."""
    copy_seconds: float
    """To copy one from memory to memory, median, taking turns with it."""


class DeltaBench(Benchmark[DeltaFigure]):
    """See the module."""

    name = "delta"
    summary = "copies on other nodes told by gradients: bytes against whole segments, bits, time to rebuild"

    @override
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--delta-steps", type=positive, default=40, help="to train (default: %(default)s)")

    @override
    def measure(self, options: argparse.Namespace, progress: Progress) -> list[DeltaFigure]:
        rows = [(dtype, period) for dtype in (torch.float32, torch.bfloat16) for period in _PERIODS]
        figures = []
        for done, (dtype, period) in enumerate(rows):
            progress(f"copies by {dtype} gradients", done, len(rows))
            figures.append(_measure(dtype, period, options.delta_steps))
        return figures

    @override
    def table(self, figures: Sequence[DeltaFigure]) -> Table:
        columns = ["gradients", "other experts", "of whole bytes", "bits", "weights differ", "moments differ"]
        title = (
            f"Copies told by gradients: {_CHOSEN} of {_EXPERTS} experts, {figures[0].steps} steps, whole segments of "
            f"{megabytes(figures[0].segment_nbytes)}"
        )
        return table_of(title, [*columns, "to rebuild", "to copy"], [_row(each) for each in figures])


class _Owner:
    """Trains experts, and has a segment of each boundary."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        generator = torch.Generator().manual_seed(0)
        shapes = [(f"experts.{e}.{name}", shape) for e in range(_EXPERTS) for name, shape in _SHAPES.items()]
        self._params = {
            fqn: torch.nn.Parameter(torch.randn(shape, generator=generator) * shape[0] ** -0.5) for fqn, shape in shapes
        }
        self._inputs = torch.randn(_EXPERTS, _ROWS, _DIM, generator=generator)
        self._targets = torch.randn(_EXPERTS, _ROWS, _DIM, generator=generator)
        self._optimizer = torch.optim.AdamW(
            self._params.values(), betas=_BETAS, eps=_EPS, weight_decay=_WEIGHT_DECAY, foreach=False
        )
        self._step = 0

    def train(self) -> StepSettings:
        """One step; its settings."""
        self._step += 1
        lr = 1e-2 * min(1.0, self._step / 10)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.zero_grad()
        for e in range(_EXPERTS):
            hidden = torch.relu(self._inputs[e] @ self._params[f"experts.{e}.w1"])
            (hidden @ self._params[f"experts.{e}.w2"] - self._targets[e]).square().mean().backward()  # type: ignore[no-untyped-call]  # torch's own
        self._optimizer.step()
        return StepSettings(lr, *_BETAS, _EPS, _WEIGHT_DECAY, decoupled=True, maximize=False)

    def segment(self, experts: Sequence[int]) -> tuple[SegmentLayout, Tensor]:
        """All bytes of now, of these experts."""
        fqns = [f"experts.{e}.{name}" for e in experts for name in _SHAPES]
        layout = SegmentLayout([spec for fqn in fqns for spec in _specs(fqn, self._params[fqn].numel())], metadata={})
        out = torch.zeros(layout.nbytes, dtype=torch.uint8)
        layout.write_header(out)
        for fqn in fqns:
            param, prefix = self._params[fqn], _prefix(fqn, self._params[fqn].numel())
            state = {"param": param, **self._optimizer.state[param]}
            layout.view(out, f"{prefix}/present").fill_(1)
            for key in (*_STATE, "step"):
                layout.view(out, f"{prefix}/{key}").copy_(state[key].detach().reshape(-1))
        return layout, out

    def gradients(self, experts: Sequence[int], settings: StepSettings) -> Gradients:
        """What the latest step consumed of these experts."""
        fqns = [f"experts.{e}.{name}" for e in experts for name in _SHAPES]
        area = torch.zeros(
            sum(gradient_nbytes(self._params[fqn].numel(), self._dtype) for fqn in fqns), dtype=torch.uint8
        )
        parts, offset = {}, 0
        for fqn in fqns:
            param = self._params[fqn]
            assert param.grad is not None
            area[offset : offset + param.numel() * self._dtype.itemsize].view(self._dtype).copy_(param.grad.reshape(-1))
            parts[_prefix(fqn, param.numel())] = PartGradient(offset, settings)
            offset += gradient_nbytes(param.numel(), self._dtype)
        return Gradients(area, self._dtype, parts)


_SHAPES = {"w1": (_DIM, _HIDDEN), "w2": (_HIDDEN, _DIM)}


def _measure(dtype: torch.dtype, period: int, steps: int) -> DeltaFigure:
    owner = _Owner(dtype)
    owner.train()
    layout, sent = owner.segment(_chosen(0, period))
    held, baseline, told = sent.clone(), Baseline.of(sent), _marker(layout, sent, 0)
    shares, rebuilds, copies, differences = [], [], [], [(0.0, 0.0)]
    for step in range(1, steps + 1):
        settings, experts = owner.train(), _chosen(step, period)
        layout, sent = owner.segment(experts)
        encoded = encode_delta(baseline, sent, owner.gradients(experts, settings))
        before, told = told, _marker(layout, sent, step)
        delta_nbytes = _wire_nbytes([encoded.recipe, *encoded.payload, squeeze(told, before)])
        shares.append(delta_nbytes / _wire_nbytes([sent, told]))
        held, seconds = _rebuild(encoded.recipe, encoded.payload, held, sent.numel(), dtype)
        rebuilds.append(seconds)
        copies.append(_copy(sent))
        differences.append(_difference(layout, held, sent))
        baseline = Baseline.of(sent)
    params, moments = (max(each) for each in zip(*differences, strict=True))
    return DeltaFigure(
        gradients=str(dtype).removeprefix("torch."),
        period=period,
        steps=steps,
        segment_nbytes=sent.numel(),
        share=statistics.mean(shares),
        equal=params == moments == 0,
        param_difference=params,
        moment_difference=moments,
        rebuild_seconds=statistics.median(rebuilds),
        copy_seconds=statistics.median(copies),
    )


def _wire_nbytes(sent: Sequence[Tensor | bytes]) -> int:
    """Of what is sent one after the other, announced by the beginning of the generation."""
    sizes = [len(each) for each in sent]
    return sum(sizes) + MESSAGE_NBYTES * (1 + sum(-(-size // DEFAULT_MAX_CHUNK) for size in sizes))


def _marker(layout: SegmentLayout, segment_U8: Tensor, step: int) -> bytes:
    """As the owner has it over the segment of a boundary."""
    generation, view = GenerationId(step=step, epoch=1), segment_U8.numpy().data
    rows = RecordRows([_record(name, span) for name, span in layout.spans.items()])
    entry = SegmentEntry(
        step=step,
        key=segment_key(generation, 0, step),
        nbytes=view.nbytes,
        digest=digest_of(view),
        records=rows.digested(view),
    )
    return RankMarker(
        run_id="0" * 32, rank=0, world_size=1, generation=generation, plan_hash="0" * 32, segments=(entry,)
    ).to_bytes()


def _record(name: str, span: Span) -> RecordEntry:
    kind, fqn, _, key = name.split("/")
    return RecordEntry(
        name=name,
        operator=fqn.rpartition(".")[0],
        kind=kind,
        fqn=fqn,
        state_key=key,
        dtype=dtype_code(span.dtype),
        global_shape=span.shape,
        global_start=0,
        numel=span.shape[0],
        offset=span.offset,
        nbytes=span.nbytes,
        digest="",
    )


def _chosen(step: int, period: int) -> list[int]:
    turn = step // period if period else 0
    return sorted((turn * _CHOSEN + i) % _EXPERTS for i in range(_CHOSEN))


def _specs(fqn: str, numel: int) -> list[TensorSpec]:
    """As a record of the session has them."""
    prefix = _prefix(fqn, numel)
    elements = [TensorSpec(f"{prefix}/{key}", torch.float32, (numel,)) for key in _STATE]
    flags = [TensorSpec(f"{prefix}/present", torch.uint8, (1,)), TensorSpec(f"{prefix}/step", torch.float32, (1,))]
    return [flags[0], elements[0], flags[1], *elements[1:]]


def _prefix(fqn: str, numel: int) -> str:
    return f"full/{fqn}/0+{numel}"


def _rebuild(
    recipe: bytes, payload: Sequence[Tensor], base_U8: Tensor, nbytes: int, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """What the holder makes of it, and how long that takes once the bytes are there; the copying is the wire's."""
    area = aligned_gradient(nbytes) + nbytes * dtype.itemsize // 12
    out = torch.zeros(area, dtype=torch.uint8)
    started = time.perf_counter()
    decoder, offset = DeltaDecoder(recipe, base_U8, out), 0
    for view in payload:
        decoder.place(offset, view.numel()).copy_(view)
        decoder.arrived(view.numel())
        offset += view.numel()
    seconds = time.perf_counter() - started
    assert decoder.whole, "the payload is shorter than its recipe says"
    return decoder.segment, seconds


def _copy(segment_U8: Tensor) -> float:
    out = torch.zeros_like(segment_U8)
    started = time.perf_counter()
    out.copy_(segment_U8)
    return time.perf_counter() - started


def _difference(layout: SegmentLayout, held_U8: Tensor, sent_U8: Tensor) -> tuple[float, float]:
    """Of weights and of moments; infinite if anything else differs."""
    if torch.equal(held_U8, sent_U8):
        return 0.0, 0.0
    worst = {"param": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}
    for name in layout.spans:
        one, other, key = layout.view(held_U8, name), layout.view(sent_U8, name), name.rpartition("/")[2]
        if key in worst:
            worst[key] = max(worst[key], float((one - other).abs().max() / other.abs().max()))
        elif not torch.equal(one, other):
            worst[key] = float("inf")
    return worst.pop("param"), max(worst.values())


def _row(figure: DeltaFigure) -> list[str]:
    return [
        figure.gradients,
        f"every {figure.period} steps" if figure.period else "never",
        f"{figure.share:.4f}",
        "equal" if figure.equal else "differ",
        f"{figure.param_difference:.1e}" if figure.param_difference else "0",
        f"{figure.moment_difference:.1e}" if figure.moment_difference else "0",
        milliseconds(figure.rebuild_seconds),
        milliseconds(figure.copy_seconds),
    ]
