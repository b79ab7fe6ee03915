"""Copies are prepared once and again when an address changes: what a segment gets is what the model has at that step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from door import PlannedTable
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.native import CopyEngine, CopyTable, PreparedTable, _library
from lightning_moe_ckpt.native._cpu import CompiledCpuEngine, CpuCopyEngine
from lightning_moe_ckpt.operators import StateSchema, discover
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.snapshot import JOURNAL, PARAM, PRESENT, SegmentWriter, StateView, _filling, dense_layout
from lightning_moe_ckpt.snapshot._filling import StepCopies


class CountingTwin(CpuCopyEngine):
    """The engine in Python."""

    num_prepared = 0

    @override
    def prepare_table(self, table: CopyTable, block_U8: Tensor) -> PreparedTable:
        self.num_prepared += 1
        return super().prepare_table(table, block_U8)


class CountingCompiled(CompiledCpuEngine):
    """The engine in C++, which reads addresses and never tensors."""

    num_prepared = 0

    @override
    def prepare_table(self, table: CopyTable, block_U8: Tensor) -> PlannedTable:
        self.num_prepared += 1
        return super().prepare_table(table, block_U8)


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

    def __init__(self, engine: CopyEngine, inputs: int = 5) -> None:
        self.module = torch.nn.Linear(inputs, 3)
        self.optimizer = torch.optim.Adam(self.module.parameters())
        view = StateView(self.module, discover(self.module), StateSchema.of(self.optimizer), {})
        step = dense_layout(view, ParallelGroups(), 64).steps[0]
        self.step_layout, self.slot, self.engine = step, step.durable, engine
        self.copies = StepCopies(step, engine)
        self.memory = torch.zeros(step.nbytes, dtype=torch.uint8)
        self.writer = SegmentWriter(step, self.memory, engine, copies=self.copies)

    def capture(self) -> None:
        self.writer.start().wait()

    def step(self) -> None:
        self.module(torch.ones(2, 5)).sum().backward()
        self.optimizer.step()

    def captured(self, fqn: str, key: str) -> Tensor:
        (name,) = [f.name for f in self.slot.table.fields if f.shard.slice.fqn == fqn and f.key == key]
        return self.slot.segment.view(self.memory, name)

    def expected(self) -> Tensor:
        """The segment, written tensor by tensor; journal and buffers are zeros."""
        view, segment_U8 = self.slot.view, torch.zeros_like(self.memory)
        self.slot.segment.write_header(segment_U8)
        for field in self.slot.table.fields:
            place, live = self.slot.segment.view(segment_U8, field.name), None
            if field.key == PRESENT:
                place.fill_(int(view.schema.has_state(view.params[field.shard.slice.fqn])))
            else:
                live = view.live(field)
            if live is not None:
                place.copy_(live)
        return segment_U8


def test_one_preparation_serves_all_steps_while_nothing_moves(engine: CountingTwin | CountingCompiled) -> None:
    """Optimizers change parameters in place."""
    training = Training(engine)
    training.step()
    for _ in range(3):
        training.step()
        training.capture()
        assert torch.equal(training.captured("weight", PARAM), training.module.weight.detach().flatten())
    assert engine.num_prepared == 1


def test_one_preparation_serves_all_slots(engine: CountingTwin | CountingCompiled) -> None:
    """Whatever lay there before; header, gaps and flags are copied like the rest."""
    training = Training(engine)
    for state, value in ((False, 255), (True, 254)):
        for _ in range(2):
            training.step() if state else None
            slots = [torch.full_like(training.memory, value) for _ in range(3)]
            for slot_U8 in slots:
                journal = training.slot.segment.spans[JOURNAL]
                slot_U8[journal.offset : journal.offset + journal.nbytes] = 0
                SegmentWriter(training.step_layout, slot_U8, engine, copies=training.copies).start().wait()
            assert all(torch.equal(slot_U8, training.expected()) for slot_U8 in slots)
    assert engine.num_prepared == 2


def test_state_that_is_not_there_yet_is_zero_however_large(
    engine: CountingTwin | CountingCompiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are fewer zeros to copy from than a tensor may have bytes."""
    monkeypatch.setattr(_filling, "_ZEROS_U8", torch.zeros(64, dtype=torch.uint8))
    training = Training(engine, inputs=40)
    training.memory.fill_(255)
    journal = training.slot.segment.spans[JOURNAL]
    training.memory[journal.offset : journal.offset + journal.nbytes] = 0
    training.capture()
    assert torch.equal(training.memory, training.expected())


@pytest.mark.parametrize("everything", [False, True], ids=["in place", "unseen"])
def test_what_changes_before_the_next_batch_is_copied_again(
    engine: CountingTwin | CountingCompiled, everything: bool
) -> None:
    """A hook changes a parameter after the boundary, in place, or by other memory and other state."""
    training = Training(engine)
    training.step()
    ticket = training.writer.start()
    training.engine.fence(ticket)
    if everything:
        training.module.weight.data = torch.full((3, 5), 7.0)
        training.optimizer.state[training.module.bias]["exp_avg"] = torch.full((3,), 5.0)
    else:
        training.module.weight.detach().mul_(3)
    training.writer.recopy_changed(ticket, everything=everything).wait()
    assert torch.equal(training.memory, training.expected())


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
    copies = training.writer._copies
    monkeypatch.setattr(copies, "_addresses", [t.data_ptr() for t in copies.bases])
    training.capture()
    assert torch.equal(training.captured("weight", PARAM), old.flatten())
