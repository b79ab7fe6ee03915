"""Silent faults, each of which changes the bit that it names and nothing else before training goes on from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from door import read_lines
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_moe_ckpt.testing import Fault, FaultInjector, fail_at
from lightning_moe_ckpt.testing._fault import FaultKind
from lightning_moe_ckpt.testing._fault_media import LastingFault, WrongProducts, turn_bit

pytestmark = pytest.mark.filterwarnings("ignore:.*(litlogger|many workers|logging interval).*")

STEP = 2
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


class Small(LightningModule):
    """Two layers and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.idle = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(3, 3)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.second(torch.relu(self.first(batch))).square().mean()  # type: ignore[no-any-return]

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Seen(Callback):
    """Bits of everything in step `STEP`: at its begin, outputs of layers, and gradients."""

    def __init__(self) -> None:
        self.bits: dict[str, Tensor] = {}
        self.losses: list[float] = []
        self._outputs: dict[str, Tensor] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, layer in pl_module.named_children():
            layer.register_forward_hook(lambda _, __, output, name=name: self._outputs.update({name: output}))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if trainer.global_step == STEP:
            self._take("parameter", dict(pl_module.named_parameters()))
            for name, param in pl_module.named_parameters():
                self._take("moment", {f"{name}/{key}": v for key, v in trainer.optimizers[0].state[param].items()})

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if trainer.global_step == STEP:
            self._take("activation", self._outputs)
            self._take("gradient", {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None})

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: object) -> None:
        self.losses.append(float(outputs["loss"]))

    def _take(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        for name, value in tensors.items():
            self.bits[f"{kind} {name}"] = value.detach().clone().flatten().view(torch.uint8)


def _train(folder: Path, *faults: Fault) -> tuple[Seen, list[str]]:
    """What was seen in a training, and the outcomes of its faults."""
    seed_everything(1, verbose=False)
    seen, injector = Seen(), FaultInjector(list(faults), folder=folder)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", max_steps=5, callbacks=[injector, seen], enable_model_summary=False, **options)
    trainer.fit(Small(), DataLoader(torch.randn(40, 4), batch_size=8))  # type: ignore[arg-type]
    lines = read_lines(folder / "rank00000.jsonl")
    return seen, [line["outcome"] for line in lines if line["event"] == "struck"]


def _turned(right: Seen, wrong: Seen, kind: str) -> list[tuple[str, int]]:
    """Places of the bits that differ, of one kind."""
    found = []
    for name in right.bits:
        if name.startswith(kind):
            difference = right.bits[name] ^ wrong.bits[name]
            found += [
                (name, 8 * i + bit) for i, byte in enumerate(difference.tolist()) for bit in range(8) if byte >> bit & 1
            ]
    return found


@pytest.mark.parametrize("kind", ["flip_parameter", "flip_moment", "flip_gradient", "flip_activation"])
def test_a_flip_changes_the_bit_that_it_names_and_nothing_else(tmp_path: Path, kind: FaultKind) -> None:
    """All that was there before, and all of its kind, is as in a training without it; what comes after it is not."""
    right, nothing = _train(tmp_path / "right")
    assert nothing == []
    bit = 31 if kind == "flip_activation" else 21  # what is negative is made zero behind it
    fqn = {"flip_gradient": "second", "flip_activation": "first"}.get(
        kind
    )  # nothing of the kind comes after it in a step
    wrong, (outcome,) = _train(tmp_path / "wrong", fail_at(0, STEP, kind=kind, bit=bit, fqn=fqn))
    what = kind.removeprefix("flip_")
    named = re.match(rf"bit {bit} of element (\d+) of ({what} \S+): (\S+) became (\S+)$", outcome)
    assert named is not None, outcome
    order = ["parameter", "moment", "activation", "gradient"]
    earlier = [each for each in order[: order.index(what)] if (each, what) != ("activation", "gradient")]
    for each in earlier:
        assert _turned(right, wrong, each) == []
    turned = _turned(right, wrong, what)
    if what == "activation":
        turned = [each for each in turned if "second" not in each[0]]  # which has the first one's output as input
    assert turned == [(named[2], 32 * int(named[1]) + bit)]
    assert right.losses[:STEP] == wrong.losses[:STEP]
    assert right.losses[-1] != wrong.losses[-1]


@pytest.mark.parametrize("kind", ["flip_gradient", "flip_activation"])
def test_what_is_never_computed_is_passed_over(tmp_path: Path, kind: FaultKind) -> None:
    """Of any name, one that the step computes is found; of a name that it does not, none, and the log says so at the end."""
    faults = [fail_at(0, STEP, kind=kind, bit=bit) for bit in range(12)]  # each draws its own place
    _, outcomes = _train(tmp_path / "any", *faults)
    names = {outcome.split()[7].removesuffix(":") for outcome in outcomes}
    assert len(outcomes) == 12
    assert not any("idle" in name for name in names)
    assert len(names) > 1
    _, outcomes = _train(tmp_path / "idle", fail_at(0, STEP, kind=kind, fqn="idle"))
    assert outcomes == []
    _, (outcome,) = _train(tmp_path / "nowhere", fail_at(0, STEP, kind=kind, fqn="third"))
    assert outcome == f"nothing to flip: there is no {kind.removeprefix('flip_')} whose name begins with `third`"


@pytest.mark.parametrize(("kind", "fqn"), [("flip_gradient", "second"), ("flip_activation", "first")])
def test_a_flip_can_let_a_step_pass(tmp_path: Path, kind: FaultKind, fqn: str) -> None:
    """With `skip=1` what it waits for is right once."""
    right, _ = _train(tmp_path / "right")
    wrong, outcomes = _train(tmp_path / "wrong", fail_at(0, STEP, kind=kind, bit=31, fqn=fqn, skip=1))
    assert len(outcomes) == 1
    assert all(_turned(right, wrong, each) == [] for each in ("activation", "gradient"))
    assert right.losses[: STEP + 1] == wrong.losses[: STEP + 1]
    assert right.losses != wrong.losses


def test_an_optimizer_without_state_has_no_moment(tmp_path: Path) -> None:
    _, (outcome,) = _train(tmp_path, fail_at(0, 0, kind="flip_moment"))
    assert outcome == "nothing to flip: there is no moment whose name begins with ``"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_bit_can_be_turned(dtype: torch.dtype) -> None:
    """Also of memory with gaps and of a scalar, unseen by the tensor's version, and back again."""
    tensor = torch.ones(3, 8).to(dtype).t()[::2]
    before, version = tensor.clone().contiguous().view(torch.uint8), tensor._version
    for bit in range(8 * tensor.element_size()):
        turn_bit(tensor, 5, bit)
        difference = tensor.clone().contiguous().view(torch.uint8) ^ before
        assert [(int(i), int(byte)) for i, byte in enumerate(difference.flatten()) if byte] == [
            (5 * tensor.element_size() + bit // 8, 1 << bit % 8)
        ]
        turn_bit(tensor, 5, bit)
    assert tensor._version == version
    assert float(turn_bit(torch.tensor(1.0), 0, 31)) == -1.0


def _products(bit: int | None, *, right: bool = False) -> list[Tensor]:
    """Products forward and backward, with right factors in each."""
    torch.manual_seed(0)
    x, w, b = torch.randn(5, 4), torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    batches = torch.randn(2, 3, 3)
    wrong = None
    lasting = LastingFault(name="x", fault=Fault(kind="wrong_products", bit=bit), step=0, since=0.0)
    if not right:
        wrong = WrongProducts(lasting)
    y, z = torch.addmm(b, x, w), torch.bmm(batches, batches)
    y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    unchanged = x * x
    if wrong is not None:
        wrong.release()
        assert lasting.calls == 3
    assert w.grad is not None
    assert b.grad is not None
    return [y.detach(), z, w.grad, b.grad, unchanged, x @ w.detach()]


@pytest.mark.parametrize("bit", [None, 3])
def test_each_product_has_one_wrong_bit(bit: int | None) -> None:
    """Forward and backward; what is no product is right, and so are products behind the end."""
    right, wrong = _products(None, right=True), _products(bit)
    for index, (want, got) in enumerate(zip(right, wrong, strict=True)):
        difference = [int(each) for each in (want.view(torch.int32) ^ got.view(torch.int32)).flatten() if each]
        assert len(difference) == (1 if index < 3 else 0)
        assert all(each.bit_count() == 1 and each < 1 << 23 for each in difference)
        assert bit is None or all(each == 1 << bit for each in difference)


def test_wrong_products_last_as_long_as_they_should(tmp_path: Path) -> None:
    """From a step on for a number of steps, the first of which is the first with another loss."""
    right, _ = _train(tmp_path / "right")
    wrong, _ = _train(tmp_path / "wrong", fail_at(0, STEP, kind="wrong_products", steps=2, bit=22))
    lines = read_lines(tmp_path / "wrong" / "rank00000.jsonl")
    ((step, calls),) = [(line["step"], line["calls"]) for line in lines if line["event"] == "over"]
    assert (step, calls) == (STEP + 2, 2 * 5)  # two layers: the first needs no gradient of its input
    assert right.losses[:STEP] == wrong.losses[:STEP]
    assert right.losses[STEP] != wrong.losses[STEP]
