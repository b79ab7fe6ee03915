"""Copies are prepared once and again when an address changes: what a segment gets is what the model has at that step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.native import CompiledCpuEngine, Copy, CopyEngine, CopyList, CpuCopyEngine, _library
from lightning_moe_ckpt.native._plan import PlannedCopies
from lightning_moe_ckpt.operators import StateSchema, discover
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.snapshot._lay_out import dense_layout
from lightning_moe_ckpt.snapshot._layout import PARAM, StateView
from lightning_moe_ckpt.snapshot._writer import SegmentWriter


class CountingTwin(CpuCopyEngine):
    """The engine in Python."""

    num_prepared = 0

    @override
    def prepare(self, copies: Sequence[Copy]) -> CopyList:
        self.num_prepared += 1
        return super().prepare(copies)


class CountingCompiled(CompiledCpuEngine):
    """The engine in C++, which reads addresses and never tensors."""

    num_prepared = 0

    @override
    def prepare(self, copies: Sequence[Copy]) -> PlannedCopies:
        self.num_prepared += 1
        return super().prepare(copies)


@pytest.fixture(params=["compiled", "twin"])
def engine(request: pytest.FixtureRequest) -> Iterator[CountingTwin | CountingCompiled]:
    library = _library.cpu()
    if request.param == "compiled" and library is None:
        pytest.skip(_library.status("cpu").reason)
    engine = CountingTwin() if library is None or request.param == "twin" else CountingCompiled(library)
    yield engine
    engine.close()


class Training:
    """A layer, its optimizer, and the writer of everything they hold."""

    def __init__(self, engine: CopyEngine) -> None:
        self.module = torch.nn.Linear(5, 3)
        self.optimizer = torch.optim.Adam(self.module.parameters())
        view = StateView(self.module, discover(self.module), StateSchema.of(self.optimizer), {})
        step = dense_layout(view, ParallelGroups(), 64).steps[0]
        self.slot = step.durable
        self.memory = torch.zeros(step.nbytes, dtype=torch.uint8)
        self.writer = SegmentWriter(step, self.memory, engine)

    def capture(self) -> None:
        self.writer.start().wait()

    def step(self) -> None:
        self.module(torch.ones(2, 5)).sum().backward()
        self.optimizer.step()

    def captured(self, fqn: str, key: str) -> Tensor:
        (name,) = [f.name for f in self.slot.own if f.part.piece.fqn == fqn and f.key == key]
        return self.slot.segment.view(self.memory, name)


def test_one_preparation_serves_all_steps_while_nothing_moves(engine: CountingTwin | CountingCompiled) -> None:
    """Optimizers change parameters in place."""
    training = Training(engine)
    training.step()
    for _ in range(3):
        training.step()
        training.capture()
        assert torch.equal(training.captured("weight", PARAM), training.module.weight.detach().flatten())
    assert engine.num_prepared == 1


def test_a_parameter_given_other_memory_is_read_there(engine: CountingTwin | CountingCompiled) -> None:
    """The tensor is the same object; the old memory still exists and holds other values."""
    training = Training(engine)
    training.capture()
    before = training.module.weight.data
    training.module.weight.data = torch.full((3, 5), 7.0)
    training.capture()
    assert torch.equal(training.captured("weight", PARAM), torch.full((15,), 7.0))
    assert not torch.equal(before, torch.full((3, 5), 7.0))
    assert engine.num_prepared == 2


def test_state_that_the_optimizer_makes_later_is_captured(engine: CountingTwin | CountingCompiled) -> None:
    """Before the first step there is none; after it there is, and when it is replaced the new one counts."""
    training = Training(engine)
    training.capture()
    assert not training.captured("weight", "exp_avg").any()
    training.step()
    training.capture()
    state = training.optimizer.state[training.module.weight]
    assert state["exp_avg"].any()
    assert torch.equal(training.captured("weight", "exp_avg"), state["exp_avg"].flatten())
    state["exp_avg"] = torch.full((3, 5), 9.0)
    training.capture()
    assert torch.equal(training.captured("weight", "exp_avg"), torch.full((15,), 9.0))
    assert engine.num_prepared == 3


def test_nothing_is_captured_from_memory_that_was_left(
    engine: CountingTwin | CountingCompiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ablation: without the look at addresses compiled copies would go on reading the old memory."""
    if not isinstance(engine, CountingCompiled):
        pytest.skip("torch's copies follow the tensor")
    training = Training(engine)
    training.capture()
    old = training.module.weight.detach().clone()
    training.module.weight.data = torch.full((3, 5), 7.0)
    monkeypatch.setattr(training.writer, "_addresses", [t.data_ptr() for t in training.writer._bases])
    training.capture()
    assert torch.equal(training.captured("weight", PARAM), old.flatten())
