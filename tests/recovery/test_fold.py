"""Differences applied in one pass are the steps that the optimizer took."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from benchmarks.differential import laid_out
from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.native import (
    AdamState,
    AdamStep,
    compress_gradients,
    decompress_gradient,
    pack_gradient,
    packed_nbytes,
    replay_adam,
    unpack_gradient,
)
from lightning_moe_ckpt.native._gradient import SparseGradient
from lightning_moe_ckpt.recovery import Difference, _fold, fold
from lightning_moe_ckpt.recovery._fold import ChainRestore
from lightning_moe_ckpt.snapshot._gradients import kernel_of
from lightning_moe_ckpt.tiers import StepSettings

NUMEL = 5056
"""Fills vectors, as `LANES` has it."""
STATE = ("exp_avg", "exp_avg_sq")


def state_of(optimizer: Optimizer, param: nn.Parameter, journal: int) -> dict[str, Tensor]:
    """What a base has of one parameter, cut in two, and of its rank."""
    state, found = optimizer.state.get(param, {}), dict[str, Tensor]()
    for start, stop in ((0, 1000), (1000, NUMEL)):
        prefix = f"full/w/{start}+{stop - start}"
        found[f"{prefix}/present"] = torch.tensor([int(bool(state))], dtype=torch.uint8)
        found[f"{prefix}/param"] = param.detach()[start:stop]
        found[f"{prefix}/step"] = torch.as_tensor(state.get("step", torch.zeros(()))).reshape(1)
        found |= {f"{prefix}/{key}": state.get(key, torch.zeros_like(param))[start:stop].detach() for key in STATE}
    return {**found, "buffer/count": torch.tensor([journal]), "journal": torch.full((64,), journal, dtype=torch.uint8)}


def difference(
    gradient: Tensor | None, settings: StepSettings | None, journal: int, dtype: torch.dtype = torch.float32
) -> Difference:
    """What leads from one step to the next."""
    gradient = torch.zeros(NUMEL, dtype=dtype) if gradient is None else gradient
    tensors = {f"delta/w/{a}+{b - a}/gradient": gradient[a:b] for a, b in ((0, 1000), (1000, NUMEL))}
    tensors |= {"buffer/count": torch.tensor([journal]), "journal": torch.full((64,), journal, dtype=torch.uint8)}
    said = None if settings is None else asdict(settings)
    return Difference(*laid_out(tensors), {"outcome": {"consumed": {"settings": [said], "others": {}}}})


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMS: dict[str, dict[str, bool]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("before", [0, 3], ids=["from the first step", "later"])
@pytest.mark.parametrize("cls", [Adam, AdamW])
def test_many_steps_in_one_pass_are_those_of_the_optimizer(
    cls: type[Adam], before: int, form: str, dtype: torch.dtype, device: str
) -> None:
    """To the last bit, with a learning rate of each step's own; a step without a gradient changes nothing."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(NUMEL, dtype=dtype, device=device))
    decay = 0.1 if cls is AdamW or dtype is torch.float32 else 0.0
    optimizer = cls([param], lr=0.1, weight_decay=decay, **FORMS[form])  # type: ignore[arg-type]
    kernel = kernel_of(optimizer.param_groups[0], param)
    assert bool(kernel) == (form == "fused" or dtype is not torch.float32 or device == "cuda")

    def step(lr: float) -> StepSettings:
        optimizer.param_groups[0]["lr"] = lr
        param.grad = torch.randn_like(param)
        optimizer.step()
        return StepSettings(lr, 0.9, 0.999, 1e-8, decay, decoupled=cls is AdamW, maximize=False, kernel=kernel)

    for _ in range(before):
        step(0.1)
    memory_U8, layout = laid_out(state_of(optimizer, param, 0))
    differences: list[Difference] = []
    for number in range(1, 6):
        settings = None if number == 3 else step(0.1 / number)
        differences.append(difference(param.grad if settings else None, settings, number, dtype))
    fold(memory_U8, layout, differences)
    for name, want in state_of(optimizer, param, 5).items():
        assert torch.equal(layout.view(memory_U8, name), want.cpu()), name


def test_differences_of_something_else_are_refused() -> None:
    """Their digests may be right, and still they lead nowhere."""
    param = nn.Parameter(torch.randn(NUMEL))
    memory_U8, layout = laid_out(state_of(AdamW([param]), param, 0))
    other = Difference(
        *laid_out({"delta/v/0+5/gradient": torch.zeros(5), "journal": torch.zeros(64, dtype=torch.uint8)}), {}
    )
    with pytest.raises(Corrupt, match="do not fit the state"):
        fold(memory_U8, layout, [other])
    silent = difference(torch.zeros(NUMEL), None, 1)
    with pytest.raises(Corrupt, match="does not say how `w` was stepped"):
        fold(memory_U8, layout, [Difference(silent.segment, silent.layout, {})])


@pytest.mark.parametrize("numel", [1, 99_999, 100_000, 200_003])
def test_what_is_packed_is_what_was_compressed(numel: int) -> None:
    """In the bytes that it needs, a gradient of zeros in one word; nothing else passes for it."""
    for gradient in (torch.zeros(numel), torch.ones(numel), torch.randn(numel)):
        (compressed,) = compress_gradients([gradient])
        packed_U8 = pack_gradient(compressed)
        assert packed_U8.numel() <= packed_nbytes(numel)
        assert torch.equal(decompress_gradient(unpack_gradient(packed_U8, numel)), decompress_gradient(compressed))
        assert packed_U8.numel() == 4 or bool(gradient.any())
    for other in (packed_U8[:-2], torch.cat([packed_U8, packed_U8[:2]])) if numel > 1 else (packed_U8,):
        with pytest.raises(ValueError, match="no compressed gradient"):
            unpack_gradient(other, numel if numel > 1 else 3)
    if numel < 100_000:
        return
    assert 4 * numel > 90 * packed_U8.numel(), "of the gradient's bytes"
    kept, tiles = ~int(packed_U8[:4].view(torch.int32)), -(-numel // 2048)
    counts, places = (packed_U8[at : at + 4].view(torch.int16) for at in (4, 4 + 2 * tiles))
    for damaged, change in ((counts, (1, 0)), (counts, (-40, 40)), (places, (2048, 0)), (places, (places[1], 0))):
        before = damaged.clone()
        damaged[:] += torch.tensor(change, dtype=torch.int16)
        with pytest.raises(ValueError, match="no compressed gradient"):
            unpack_gradient(packed_U8, numel)
        damaged[:] = before
    assert kept == unpack_gradient(packed_U8, numel).parts[0].values.numel()  # type: ignore[union-attr]
    packed_U8[:4].view(torch.int32)[0] = kept  # as earlier builds had it
    with pytest.raises(ValueError, match="no compressed gradient"):
        unpack_gradient(packed_U8, numel)


@pytest.mark.parametrize("numel", [5, 100_000])
def test_a_packed_gradient_of_zeros_is_applied(numel: int) -> None:
    """An expert without tokens has such gradients, and its moments decay all the same."""
    states = [AdamState(*(torch.ones(numel) for _ in range(3))) for _ in range(2)]
    (compressed,) = compress_gradients([torch.zeros(numel)])
    for state, gradient in zip(
        states, (unpack_gradient(pack_gradient(compressed), numel), torch.zeros(numel)), strict=True
    ):
        replay_adam(state, [AdamStep(gradient=gradient, step=3, lr=0.1)])
    assert all(map(torch.equal, states[0].tensors(), states[1].tensors()))
    assert not states[0].exp_avg.equal(torch.ones(numel))


class _Rank(ChainRestore):
    """One of two ranks, whose records are all as they were written."""

    def __init__(self, restores: list[_Rank], turn: Barrier, param: nn.Parameter, links: list[Difference]) -> None:
        super().__init__(self, self, [{}], len(links))  # type: ignore[arg-type]
        self._restores, self._turn, self._param, self._links = restores, turn, param, links
        self.said: object = None

    def gather_values(self, value: object) -> list[Any]:
        self.said = value
        self._turn.wait(10)
        found = [each.said for each in self._restores]
        self._turn.wait(10)
        return found

    def _bring(self, steps: Sequence[int]) -> Any:
        self.gather_values([])
        self.reached = steps[-1]
        if steps[0]:
            return [[SimpleNamespace(difference=self._links[step - 1]) for step in steps]]
        segment, layout = laid_out(state_of(AdamW([self._param]), self._param, 0))
        return [[SimpleNamespace(segment=segment, layout=layout)]]


@pytest.mark.parametrize("bad", [1, 5, 10, 12])
def test_ranks_agree_on_a_difference_that_does_not_fit(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All digests are right, and one rank cannot apply it: all ranks end at the step before, none waits for ever."""
    monkeypatch.setattr(_fold, "base_step", lambda *_: 0)
    param, settings = nn.Parameter(torch.randn(NUMEL)), StepSettings(0.1, 0.9, 0.999, 1e-8, 0.0, True, False)
    good = [difference(torch.randn(NUMEL), settings, number) for number in range(1, 13)]
    other = [*good]
    other[bad - 1] = Difference(good[bad - 1].segment, good[bad - 1].layout, {})
    restores: list[_Rank] = []
    turn = Barrier(2)
    restores += [_Rank(restores, turn, param, links) for links in (good, other)]
    with ThreadPoolExecutor(2) as threads:
        states = [each[0] for each in threads.map(_Rank.run, restores) if each is not None]
    memory_U8, layout = laid_out(state_of(AdamW([param]), param, 0))
    if bad > 1:
        fold(memory_U8, layout, good[: bad - 1])
    for restore, state in zip(restores, states, strict=True):
        assert restore.reached == bad - 1
        assert [why[: len(f"step {bad} is bad")] for why in restore.reasons] == [f"step {bad} is bad"]
        assert torch.equal(state.segment, memory_U8)


@pytest.mark.parametrize("numel", [0, 99_999, 100_000, 300_001])
def test_a_step_of_zeros_is_repeated(numel: int) -> None:
    """Weights decay, and moments go on, although nothing of the gradient is kept."""
    compressed = compress_gradients([torch.zeros(numel)])[0]
    states = []
    for gradient in (unpack_gradient(pack_gradient(compressed), numel), torch.zeros(numel)):
        states.append(AdamState(*(torch.ones(numel) for _ in range(3))))
        replay_adam(states[-1], [AdamStep(gradient=gradient, step=2, lr=0.1, weight_decay=0.1)])
    assert all(map(torch.equal, states[0].tensors(), states[1].tensors()))


def test_gradients_that_earlier_builds_packed_are_read() -> None:
    """Their places are those of the whole part, and behind both columns is room for as many elements as could be kept."""
    gradient = torch.randn(200_003)
    (compressed,) = compress_gradients([gradient])
    assert isinstance(compressed, SparseGradient)
    (part,) = compressed.parts
    columns = [part.indices, part.values]
    for column in columns:
        column[int(part.tiles[-1]) :] = 0
    packed_U8 = torch.cat([column.view(torch.uint8) for column in (part.tiles[-1:], *columns)])
    found = unpack_gradient(packed_U8, gradient.numel())
    assert torch.equal(decompress_gradient(found), decompress_gradient(compressed))


def test_compressed_differences_are_applied_as_they_are() -> None:
    """As the steps that the decompressed gradients make, to the last bit."""
    torch.manual_seed(0)
    param, other = (nn.Parameter(torch.zeros(NUMEL)) for _ in range(2))
    optimizer, same = (AdamW([each], lr=0.1) for each in (param, other))
    memory_U8, layout = laid_out(state_of(optimizer, param, 0))
    settings = StepSettings(0.1, 0.9, 0.999, 1e-8, 0.01, decoupled=True, maximize=False)
    differences = []
    for number in range(1, 6):
        gradient = torch.randn(NUMEL)
        parts = {f"delta/w/{a}+{b - a}/packed": gradient[a:b] for a, b in ((0, 1000), (1000, NUMEL))}
        compressed = compress_gradients(list(parts.values()))
        tensors = dict(zip(parts, map(pack_gradient, compressed), strict=True))
        tensors |= {"buffer/count": torch.tensor([number]), "journal": torch.full((64,), number, dtype=torch.uint8)}
        said = {"outcome": {"consumed": {"settings": [asdict(settings)], "others": {}}}}
        differences.append(Difference(*laid_out(tensors), said))
        other.grad = torch.cat([decompress_gradient(each) for each in compressed])
        same.step()
    fold(memory_U8, layout, differences)
    for name, want in state_of(same, other, 5).items():
        assert torch.equal(layout.view(memory_U8, name), want), name
