"""What stages keep of what crosses their borders is what their neighbours got, and is enough to repeat every step alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from launcher import WorldFailed
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins.precision import MixedPrecision
from typing_extensions import override

from lightning_moe_ckpt.parallel._upstream import UpstreamLog, digests_of
from strategy._staged import Staged, Trained, train

Kept = list[Any]
"""Answers, what was sent and digests of what was received, for each step of one rank."""


def digest_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([*map(int, digests_of(tensors))])


class Keeps(pl.Callback):
    """Keeps what crosses borders; with `first` and records of neighbours steps are repeated from those."""

    def __init__(self, given: Callable[[int], tuple[Kept | None, Kept | None]] | None = None) -> None:
        self._given = given

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        upstream = log_of(trainer)
        upstream.keep(keeps=True)
        if self._given is not None:
            before, behind = self._given(trainer.global_rank)
            upstream.repeat(0, [each[0] for each in before or behind or []], before, behind)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        log_of(trainer).begin_step(trainer.global_step)


def log_of(trainer: pl.Trainer) -> UpstreamLog:
    log: UpstreamLog = trainer.strategy.upstream  # type: ignore[attr-defined]
    return log


def kept(trainer: pl.Trainer) -> Kept:
    log = log_of(trainer)
    log.go_on()
    assert log.nbytes > 0
    assert log.has(0, trainer.global_step)
    return [log.given_for(step) for step in range(trainer.global_step)]


class Dropped(Staged):
    """Draws numbers, has buffers, and logs what ranks average."""

    def __init__(self) -> None:
        super().__init__(0.2, norm=True, batch_size=8)

    @override
    def on_validation_epoch_end(self) -> None:
        self.log("rank", float(self.global_rank), sync_dist=True)


def ran(world_size: int, stages: int, given: Any = None, **options: Any) -> list[Trained]:
    """Train two epochs with validation in them, and return what was kept, too."""
    strategy = {"pipeline_parallel": stages, "micro_batches": 4 if stages > 2 else 2, **options.pop("strategy", {})}
    callbacks = [Keeps(given), EarlyStopping("val", patience=50)]
    more = {"limit_val_batches": 2, "val_check_interval": 2, "max_epochs": 2, "gradient_clip_val": 0.05}
    return train(world_size, model=Dropped, after=kept, strategy=strategy, callbacks=callbacks, **{**more, **options})


def neighbours(found: list[Trained], stages: int) -> Callable[[int], tuple[Kept | None, Kept | None]]:
    """What the ranks before and behind one have for it."""
    size = len(found) // stages

    def given(rank: int) -> tuple[Kept | None, Kept | None]:
        before, behind = rank - size, rank + size
        return (
            found[before].value if before >= 0 else None,
            found[behind].value if behind < len(found) else None,
        )

    return given


def scaled() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


@pytest.mark.parametrize(
    ("world_size", "stages", "strategy", "more"),
    [
        pytest.param(2, 2, {"schedule": "gpipe"}, dict, marks=pytest.mark.soak),
        (3, 3, {"schedule": "1f1b"}, dict),
        (4, 2, {"expert_parallel": 2, "schedule": "gpipe"}, dict),
        pytest.param(2, 2, {"schedule": "1f1b"}, scaled, marks=pytest.mark.soak),
    ],
    ids=["gpipe", "1f1b", "experts", "scaled"],
)
def test_a_stage_repeats_steps_from_what_its_neighbours_have_kept(
    world_size: int, stages: int, strategy: dict[str, Any], more: Callable[[], dict[str, Any]]
) -> None:
    """With the same bits in weights, losses, metrics, and in what it would send; validation and dropout included."""
    found = ran(world_size, stages, strategy=strategy, **more())
    size = world_size // stages
    for rank in range(world_size - size):
        for above, below in zip(found[rank].value, found[rank + size].value, strict=True):
            assert below[2]["down"] == [digest_of(each).tolist() for each in above[1]["down"]]
            assert above[2]["up"] == [digest_of(each).tolist() for each in below[1]["up"]]
            assert len(below[2]["down"]) > 0
            assert len(above[2]["up"]) > 0
            assert [kind for kind, _ in above[0]] == [kind for kind, _ in below[0]]
    again = ran(world_size, stages, neighbours(found, stages), strategy=strategy, **more())
    for before, after in zip(found, again, strict=True):
        assert all(torch.equal(parameter, after.parameters[name]) for name, parameter in before.parameters.items())
        assert all(map(torch.equal, before.losses, after.losses))
        assert all(map(torch.equal, before.logged, after.logged))
        assert before.val is not None
        assert after.val is not None
        assert torch.equal(before.val, after.val)
        for step, (was, now) in enumerate(zip(before.value, after.value, strict=True)):
            assert was[2] == now[2], f"step {step} got other inputs"
            assert [[digest_of(e).tolist() for e in was[1][way]] for way in ("down", "up")] == [
                [digest_of(e).tolist() for e in now[1][way]] for way in ("down", "up")
            ]


class Elsewhere(Dropped):
    """Has other weights in the last block of each stage than the run before."""

    @override
    def on_train_start(self) -> None:
        with torch.no_grad():
            next(p for name, p in self.named_parameters() if name.endswith("moe.gate.weight") or "gate" in name).add_(1)


def test_a_stage_that_repeats_steps_otherwise_is_found_out() -> None:
    """By the first tensor or loss that is not what it was; where it would go on with the others at the latest."""
    found = ran(2, 2)
    with pytest.raises(WorldFailed, match=r"Diverged: (other (activations|gradients)|what a stage computed)"):
        train(
            2,
            model=Elsewhere,
            after=kept,
            strategy={"pipeline_parallel": 2, "micro_batches": 2},
            callbacks=[Keeps(neighbours(found, 2))],
            limit_val_batches=2,
            val_check_interval=2,
        )


def test_steps_that_nobody_repeats_any_more_are_forgotten() -> None:
    """Memory does not grow with the run, and what is gone is not offered."""
    log = UpstreamLog()
    log.keep(keeps=True)
    for step in range(6):
        log.begin_step(step)
        log.sent("down", [torch.zeros(8)])
    assert log.nbytes == 6 * 32
    log.collect(4)
    assert (log.steps, log.nbytes) == (range(4, 6), 2 * 32)
    assert not log.has(3, 6)
    assert log.has(4, 6)
    log.begin_step(5)
    assert log.nbytes == 32, "what an attempt has sent that was begun again is not kept twice"


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (3, 1024), (1031, 9)], ids=str)
def test_a_digest_is_of_every_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Whatever the strides and the place in memory; another type, shape, bit or order has another one."""
    draw = torch.Generator().manual_seed(1)
    numel = torch.Size(shape).numel()
    nbytes = torch.randint(
        0, 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,), generator=draw, dtype=torch.uint8
    )
    tensor = nbytes.view(dtype).view(shape)
    digest = digest_of([tensor])
    assert digest.dtype == torch.int64
    padded = torch.cat([nbytes[:1].new_zeros(dtype.itemsize), nbytes]).view(dtype)[1:].view(shape)
    assert torch.equal(digest_of([padded, tensor]), digest.repeat(2))
    if tensor.ndim == 2:
        assert torch.equal(digest_of([tensor.t().contiguous().t()]), digest)
        assert not torch.equal(digest_of([tensor.flatten()]), digest)
        assert not torch.equal(digest_of([tensor.flip(0)]), digest)
    for at in range(0, len(nbytes), max(1, len(nbytes) // 7)):
        other = nbytes.clone()
        other[at] ^= 1
        assert not torch.equal(digest_of([other.view(dtype).view(shape)]), digest)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_a_device_sends_is_copied_beside_what_it_computes() -> None:
    """Before memory is used again; digests are made there too."""
    log = UpstreamLog()
    log.keep(keeps=True)
    log.begin_step(0)
    expected = []
    for number in range(16):
        sent = torch.full((1 << 20,), float(number), device="cuda")
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
        log.sent("down", [sent * 2])
        log.received("up", [sent])
        expected.append(torch.full((1 << 20,), 2.0 * number))
        del sent
        torch.full((1 << 20,), -1.0, device="cuda")
    _, sent_again, seen = log.given_for(0)
    assert all(torch.equal(each, found) for each, (found,) in zip(expected, sent_again["down"], strict=True))
    assert seen["up"] == [digest_of([each.cuda() / 2]).tolist() for each in expected]
