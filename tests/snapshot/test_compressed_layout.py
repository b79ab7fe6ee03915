"""Compressed gradients lie where the layout says, part by part, also where a rank writes several parts of a parameter."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from snapshot._partial_model import rank_of_world

from lightning_moe_ckpt.native import compress_gradients, decompress_gradient, unpack_gradient
from lightning_moe_ckpt.operators import RecordKind
from lightning_moe_ckpt.parallel import set_current_groups
from lightning_moe_ckpt.policies import Plan, all_names
from lightning_moe_ckpt.snapshot import PACKED, DifferentialRecorder, PlanRecord, columns_of, lay_out, repeatable


@pytest.fixture(autouse=True)
def _groups() -> Iterator[None]:
    yield
    set_current_groups(None)


@pytest.mark.parametrize(("world_size", "ep_size"), [(1, 1), (3, 1), (3, 3)])
def test_every_part_that_a_rank_writes_is_in_its_place(world_size: int, ep_size: int) -> None:
    """With error feedback the second step has what the first one left out, until a base has everything."""
    torch.manual_seed(0)
    for rank in range(world_size):
        view, groups = rank_of_world(rank, world_size, ep_size)
        view.repeatable, view.difference_dtype = frozenset(view.params), torch.uint8
        record = PlanRecord(plan=Plan.of_everything(all_names(view.operators), RecordKind.DELTA), config={})
        (layout,) = lay_out(record, view, groups, 1024).steps
        recorder = DifferentialRecorder(view, error_feedback=True)
        left_out: dict[str, torch.Tensor] = {}
        for number in range(3):
            for param in view.params.values():
                param.grad = torch.randn_like(param)
            recorder.step_begins()
            view.schema.optimizer.step()
            assert recorder.boundary()
            if number == 2:
                recorder.based()
                left_out.clear()
            taken = recorder.compress(layout)
            assert taken.nbytes <= layout.nbytes
            slot_U8 = torch.full((taken.nbytes,), 7, dtype=torch.uint8)
            table = columns_of(taken).table(dict.fromkeys(view.params, True))
            rows = zip(table.source, table.start, table.numel, table.offset, strict=True)
            for source, start, numel, offset in rows:
                bytes_U8 = table.sources[source].reshape(-1)[start : start + numel].view(torch.uint8)
                slot_U8[offset : offset + len(bytes_U8)] = bytes_U8
            fields = [field for field in taken.durable.table.fields if field.key == PACKED]
            for field in fields:
                piece = field.shard.slice
                gradient = view.params[piece.fqn].grad
                assert gradient is not None
                whole = gradient.view(-1)[piece.start : piece.stop] + left_out.get(field.name, 0)
                (compressed,) = compress_gradients([whole])
                packed_U8 = taken.durable.segment.view(slot_U8, field.name)
                found = decompress_gradient(unpack_gradient(packed_U8, piece.numel))
                assert torch.equal(found, decompress_gradient(compressed)), (number, field.name)
                left_out[field.name] = whole - found
            recorder.release()
        recorder.close()
        assert max(Counter(field.shard.slice.fqn for field in fields).values()) > 1, "experts of one parameter"


WIDE, NARROW = torch.float32, torch.bfloat16
REPEATED = [
    ({}, WIDE, "all"),
    ({"foreach": True}, WIDE, "all"),
    ({"fused": True}, WIDE, "full vectors"),
    ({}, NARROW, "full vectors"),
    ({"fused": True, "decoupled_weight_decay": False}, NARROW, "full vectors"),
    ({"decoupled_weight_decay": False}, NARROW, "none"),
    ({"differentiable": True, "foreach": False}, WIDE, "none"),
    ({"amsgrad": True}, torch.float16, "none"),
]


@pytest.mark.parametrize(("options", "dtype", "which"), REPEATED)
def test_steps_are_repeated_where_bits_are(options: dict[str, bool], dtype: torch.dtype, which: str) -> None:
    """Scalar code at the end of a parameter may round otherwise than vectors, which no part can tell."""
    view, _ = rank_of_world(0, 1, 1)
    view.module.to(dtype)
    view.schema.optimizer.param_groups[0].update(options)
    found, whys = repeatable(view, exact=True)
    full = {fqn for fqn, param in view.params.items() if param.numel() % 64 == 0}
    assert 0 < len(full) < len(view.params)
    assert found == {"all": set(view.params), "full vectors": full, "none": set()}[which], whys
    assert set(whys) == view.params.keys() - found


def test_gradients_of_several_steps_to_one_boundary_are_let_go() -> None:
    """They cannot be repeated from the last step's gradients."""
    view, _ = rank_of_world(0, 1, 1)
    view.repeatable = frozenset(view.params)
    recorder, kept = DifferentialRecorder(view), []
    for _step in range(2):
        for param in view.params.values():
            param.grad = torch.randn_like(param)
        kept.append(weakref.ref(next(iter(view.params.values())).grad))
        recorder.step_begins()
        view.schema.optimizer.step()
    view.schema.optimizer.zero_grad()
    assert [each() for each in kept] == [None, None]
    assert not recorder.boundary()
    recorder.close()


@pytest.mark.parametrize("change", ["none", "foreach", "fused", "capturable", "tensor", "scale"])
def test_a_step_taken_otherwise_than_judged_is_no_difference(change: str) -> None:
    """Options are judged once; a step with others is taken whole, since nobody knows how it rounds."""
    view, _ = rank_of_world(0, 1, 1)
    if change == "scale":
        view.module.to(NARROW)
    optimizer = view.schema.optimizer
    (group,) = optimizer.param_groups
    group["fused"], group["foreach"] = change == "scale", None
    view.repeatable, view.difference_dtype = repeatable(view, exact=True)[0], WIDE
    recorder = DifferentialRecorder(view)
    changes = {"foreach": {"foreach": True}, "fused": {"fused": True}, "capturable": {"capturable": True}}
    for number in range(2):
        for param in view.params.values():
            param.grad = torch.randn_like(param)
        recorder.step_begins()
        if number:
            group.update(changes.get(change, {}))
            group["lr"] = torch.tensor(0.1) if change == "tensor" else 0.1
            if change == "scale":
                optimizer.grad_scale = torch.tensor(3.0)  # type: ignore[attr-defined]
        # No GPU: torch refuses to take this step here, which the hook does not know.
        recorder._stepped(optimizer, (), {}) if change == "capturable" else optimizer.step()
        assert recorder.boundary() == (not number or change == "none"), (number, change)
        recorder.release()
    recorder.close()
