"""Real Tutel layers do what the adapter says of them, in one process and expert parallel in two."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from launcher import WorldFailed, run_world
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_moe_ckpt.errors import ConfigurationError, UnknownLayout
from lightning_moe_ckpt.operators import LoadCounter, OperatorSet, discover
from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.testing import AdapterContract

moe = pytest.importorskip("tutel.moe", reason="Tutel is not installed: see its own instructions", exc_type=ImportError)
pytestmark = pytest.mark.tutel

E, D, T = 4, 8, 30
LIMIT = timedelta(seconds=90)


def build(*, ranks: int = 1, group: Any = None, bpr: bool = False, **gate: Any) -> Any:
    """A layer over `ranks`, whose experts do not depend on how many those are."""
    torch.manual_seed(0)
    layer = moe.moe_layer(
        gate_type={"type": "top", "k": 2, **gate},
        model_dim=D,
        experts={
            "type": "ffn",
            "num_experts_per_device": E // ranks,
            "hidden_size_per_expert": 2 * D,
            "activation_fn": functional.gelu,
        },
        group=group,
        batch_prioritized_routing=bpr,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        layer.gates[0].wg.weight.copy_(torch.randn(E, D, generator=generator) / 3)
        mine = slice(dist.get_rank() * (E // ranks), (dist.get_rank() + 1) * (E // ranks)) if ranks > 1 else slice(E)
        for _, parameter in sorted(layer.experts.named_parameters()):
            parameter.copy_(torch.randn(E, *parameter.shape[1:], generator=generator)[mine] / 3)
    return nn.ModuleDict({"inp": nn.Identity(), "moe": layer})


def tokens(seed: int = 3) -> Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(seed)) + 0.5


def demand(model: Any, x_TD: Tensor) -> Tensor:
    return torch.bincount(model["moe"].gates[0](x_TD).topk(2).indices.view(-1), minlength=E)


@pytest.mark.parametrize("capacity_factor", [0.6, 0.0, -0.75])
@pytest.mark.parametrize("bpr", [False, True])
def test_counts_equal_a_manual_count(capacity_factor: float, bpr: bool) -> None:
    """Chosen, processed and dropped, with prioritised routing too; its own count is wrong then."""
    if bpr and capacity_factor <= 0:
        with pytest.raises(UnknownLayout, match="batch_prioritized_routing"):
            discover(build(capacity_factor=capacity_factor, bpr=True))
        return
    model = build(capacity_factor=capacity_factor, bpr=bpr)
    operators = discover(model)
    counter = LoadCounter(operators, model)
    counter.install()
    x_TD = tokens().requires_grad_()
    torch.autograd.backward(checkpoint(model["moe"], x_TD, use_reentrant=False).sum())
    want_E = demand(model, tokens())
    fair = -(-T // E)
    limit = 2 * int(abs(capacity_factor) * fair) if capacity_factor else int(want_E.max())
    assert torch.equal(counter.read_and_reset(), want_E.clamp(max=limit))
    assert bool((want_E > limit).any()) == bool(capacity_factor), "tokens are dropped, or none is"
    model.eval()
    model["moe"](tokens())
    assert counter.read_and_reset().sum() == 0


def test_what_is_processed_is_what_the_experts_get() -> None:
    """Rows of zeros are places that no token took."""
    model = build(capacity_factor=0.6)
    counter = LoadCounter(discover(model), model)
    counter.install()
    seen: list[Tensor] = []
    model["moe"].experts.register_forward_pre_hook(lambda _, args: seen.append((args[0].abs().sum(-1) > 0).sum(-1)))
    model["moe"](tokens())
    assert torch.equal(counter.read_and_reset(), seen[0])


def test_live_capacity_lets_more_tokens_through_and_goes_back() -> None:
    """One value for all experts of the layer."""
    model = build(capacity_factor=0.5)
    operators = discover(model)
    counter, view = LoadCounter(operators, model), operators.layers[0].live_capacity
    assert view is not None
    counter.install()
    before, plain_TD = view.get(model), model["moe"](tokens()).detach()
    plain_E = counter.read_and_reset()
    view.set(model, view.scaled(before, [1.0, 1.5, 1.0, 1.0]))
    assert model["moe"].gates[0].capacity_factor == 0.75
    model["moe"](tokens())
    boosted_E = counter.read_and_reset()
    assert torch.equal(boosted_E, demand(model, tokens()).clamp(max=12))
    assert plain_E.max() == 8
    assert boosted_E.max() == 12
    view.set(model, before)
    assert torch.equal(model["moe"](tokens()), plain_TD)


@pytest.mark.parametrize("_capacity_factor", [0.0, 0.6], indirect=True)
@pytest.mark.usefixtures("_capacity_factor")
class TestRealLayer(AdapterContract):
    """What is promised of every layer, with and without drops: tokens are found out by force, not by Tutel's word."""

    capacity_factor: ClassVar[float]

    @pytest.fixture
    def _capacity_factor(self, request: pytest.FixtureRequest) -> None:
        type(self).capacity_factor = request.param

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(D, D), build(capacity_factor=self.capacity_factor)["moe"])

    def loss(self, model: nn.Module, seed: int) -> Tensor:
        loss: Tensor = model(tokens(seed)).square().mean()
        return loss

    @override
    def test_a_capacity_view_changes_the_live_capacity(self, model: nn.Module, operators: OperatorSet) -> None:
        """By half, since Tutel cannot run with room for no token at all."""
        view = operators.layers[0].live_capacity
        assert view is not None
        if not view.limited(model):
            pytest.skip("nothing is dropped")
        before, plain_TD = view.get(model), model(tokens())
        view.set(model, view.scaled(before, [0.5] * E))
        assert not torch.equal(model(tokens()), plain_TD)
        view.set(model, before)
        assert torch.equal(model(tokens()), plain_TD)


# -- in two processes


def _count_in_two(rank: int) -> tuple[list[int], list[int]]:
    model = build(ranks=2, capacity_factor=0.6)
    operators = discover(model, ep_size=2)
    counter = LoadCounter(operators, model)
    counter.install()
    model["moe"](tokens(seed=rank))
    counts_E = counter.read_and_reset()
    dist.all_reduce(counts_E)
    return counts_E.tolist(), [op.expert_idx for op in operators if op.expert_idx is not None]


def test_ranks_count_their_own_tokens_for_all_experts_and_hold_a_share_of_them() -> None:
    """Summed over ranks it is the manual count; rank r has experts 2r and 2r + 1."""
    limit = 2 * int(0.6 * -(-T // E))
    want_E = sum(demand(build(), tokens(seed=rank)).clamp(max=limit) for rank in range(2))
    assert isinstance(want_E, Tensor)
    assert run_world(2, _count_in_two, timeout=LIMIT) == [(want_E.tolist(), [0, 1]), (want_E.tolist(), [2, 3])]


class Regression(pl.LightningModule):
    """A dense layer, Tutel's, a dense one; all tokens are kept."""

    def __init__(self, *, early: bool = False, ignore: bool = False, alone: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.inp, self.head = nn.Linear(D, D), nn.Linear(D, 1)
        self.alone, self.ignore = alone, ignore
        self.moe: Any = build(capacity_factor=0.0)["moe"] if early else None

    def configure_model(self) -> None:
        if self.moe is None:
            ranks = dist.get_world_size() if dist.is_initialized() and not self.alone else 1
            own = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()] if self.alone else None
            self.moe = build(ranks=ranks, group=own, capacity_factor=0.0)["moe"]
        if self.ignore:
            self._ddp_params_and_buffers_to_ignore = [
                n for n, p in self.named_parameters() if hasattr(p, "_tutel_expert")
            ]

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        h = torch.tanh(self.inp(batch[0]))
        loss: Tensor = (self.head(h + self.moe(h))[:, 0] - batch[1]).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def _fit(rank: int, *, ranks: int, folder: str, ckpt: str | None = None, ep: int | None = None, **options: Any) -> Any:
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    x = torch.randn(64, D, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.sum(1).sin()), batch_size=16 // ranks)
    strategy = MoEStrategy(expert_parallel=ranks if ep is None else ep)
    trainer = pl.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=2 if ckpt else 1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    module = Regression(**options)
    trainer.fit(module, loader, ckpt_path=ckpt)
    trainer.save_checkpoint(f"{folder}/{ranks}{'-again' if ckpt else ''}.ckpt")
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def _state(path: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(path, weights_only=False)["state_dict"]
    return state


def test_two_ranks_train_as_one_process_does_and_their_checkpoint_holds_all_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of experts are neither doubled nor averaged with other experts'; the user's list for DDP changes nothing."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    folder = str(tmp_path)
    (alone,) = run_world(1, partial(_fit, ranks=1, folder=folder), timeout=LIMIT, process_group=False)
    for ignore in (False, True):
        run_world(2, partial(_fit, ranks=2, folder=folder, ignore=ignore), timeout=LIMIT, process_group=False)
        both = _state(tmp_path / "2.ckpt")
        for name, value in alone.items():
            torch.testing.assert_close(both[name], value)
    run_world(1, partial(_fit, ranks=1, folder=folder, ckpt=f"{folder}/2.ckpt"), timeout=LIMIT, process_group=False)
    run_world(2, partial(_fit, ranks=2, folder=folder, ckpt=f"{folder}/1.ckpt"), timeout=LIMIT, process_group=False)
    one, two = _state(tmp_path / "1-again.ckpt"), _state(tmp_path / "2-again.ckpt")
    for name in alone:
        torch.testing.assert_close(two[name], one[name])


@pytest.mark.parametrize(
    ("ranks", "options", "reason"),
    [
        (2, {"early": True}, "configure_model"),
        (2, {"alone": True, "ignore": True, "ep": 1}, "ranks would diverge"),
    ],
    ids=["built before the process group", "replicas that are not averaged"],
)
def test_the_strategy_refuses_what_would_train_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, options: dict[str, Any], reason: str
) -> None:
    """Before the first step, on every rank."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    work = partial(_fit, ranks=ranks, folder=str(tmp_path), **options)
    with pytest.raises(WorldFailed, match=f"(?s){ConfigurationError.__name__}.*{reason}"):
        run_world(ranks, work, timeout=LIMIT, process_group=False)


def _in_pairs(_rank: int) -> str:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer = moe.moe_layer(
        gate_type={"type": "top", "k": 1},
        model_dim=D,
        experts={
            "type": "ffn",
            "num_experts_per_device": 2,
            "hidden_size_per_expert": D,
            "activation_fn": functional.gelu,
        },
        group=pairs[dist.get_rank() // 2],
    )
    with pytest.raises(UnknownLayout) as caught:
        discover(layer, ep_size=2)
    return str(caught.value)


def test_a_group_that_is_a_part_of_the_world_is_refused() -> None:
    """Its backward would exchange gradients over all ranks."""
    assert all("2 of 4 ranks" in reason for reason in run_world(4, _in_pairs, timeout=LIMIT))
