"""Experts that lost tokens get more capacity until they have made up for them, and then everything is as before."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from launcher import run_world
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.boosting import (
    _FORMULAS,
    USE_DECAY,
    WATCHED_STEPS,
    TokenDeficits,
    _formula,
    boost_factors,
    reroute,
)
from lightning_moe_ckpt.boosting import weights as route_weights
from lightning_moe_ckpt.callbacks import CapacityBoost, DenseCheckpoint
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.policies import TokenLedger
from lightning_moe_ckpt.strategy import MoEStrategy

# Shape suffixes: B sequences, S tokens of one, T tokens, E experts, D model dim.

D, E, TOKENS = 4, 4, 40
FACTOR = 0.5
BASE = round(FACTOR * TOKENS / E)
"""Slots of an expert in one forward, top-1."""
NO_BOOST = {
    "expired": [0] * E, "base": None, "factors": [1.0], "term": None, "since": 0, "displaced": 0, "use": [], "watched": 0
}  # fmt: skip
"""Of a layer whose debts are repaid."""


def load_standin() -> Any:
    """Tests are imported by path; so is what they share."""
    path = Path(__file__).parents[1] / "operators" / "_tutel_standin.py"
    spec = importlib.util.spec_from_file_location("_tutel_standin", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class PartialRun(DenseCheckpoint):
    """Says that tokens were lost, as a partial restore does; what is stored and restored is real."""

    def __init__(self, url: str, lost: tuple[int, ...]) -> None:
        super().__init__(url, every_n_steps=1, freeze_heap=False, untouched=["module.live", "module.routed"])
        self.lost = torch.tensor(lost)

    @property
    @override
    def accounting(self) -> TokenLedger | None:
        return replace(TokenLedger.start((E,)), lost=self.lost)


class Model(LightningModule):
    """One layer; most tokens want expert 0, some expert 1, few the others."""

    def __init__(self, factor: float = FACTOR, fail_at: int | None = None) -> None:
        super().__init__()
        self.factor, self.fail_at = factor, fail_at
        self.moe: MoELayer | None = None
        self.routed: list[list[int]] = []
        self.live: list[Any] = []

    @override
    def configure_model(self) -> None:
        if self.moe is None:
            self.moe = MoELayer(D, 8, E, top_k=1, capacity_factor=self.factor)
            with torch.no_grad():
                self.moe.gate.weight.copy_(torch.tensor([3.0, 2.5, -4.0, -4.0])[:, None].expand(E, D))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.moe is not None
        if self.fail_at == self.global_step:
            checkpoint = next(callback for callback in self.trainer.callbacks if isinstance(callback, PartialRun))  # type: ignore[attr-defined]
            assert checkpoint.wait_committed(60)
            raise RuntimeError("crash")
        before_E = self.moe.tokens_per_expert + self.moe.drops_per_expert
        self.live.append(self.moe.capacity_factor)
        loss: Tensor = (self.moe(batch[0]) - batch[0]).square().mean()
        self.routed.append((self.moe.tokens_per_expert + self.moe.drops_per_expert - before_E).tolist())
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(module: LightningModule, *callbacks: Callback, steps: int = 12, **options: Any) -> Trainer:
    seed_everything(0, verbose=False)
    data = torch.randn(steps * TOKENS, D, generator=torch.Generator().manual_seed(2)) + 0.3
    return tiny.fit(module, tiny.rows(data, TOKENS), *callbacks, max_steps=steps, **options)


def weights(module: LightningModule) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- our own layer


def test_debts_are_repaid_with_extra_tokens_and_capacity_goes_back(tmp_path: Path) -> None:
    """A tenth more from the second step on; paid is only what would have been dropped; then the value is the old one."""
    module, boost = Model(), CapacityBoost()
    fit(module, PartialRun(str(tmp_path), (3, 0, 0, 0)), boost)
    assert module.live[0] == FACTOR
    boosted = [i for i, live in enumerate(module.live) if live != FACTOR]
    assert boosted, "the live capacity changed"
    debt = 3
    for step in boosted:
        assert module.live[step][0] == pytest.approx(1.1 * FACTOR)
        assert debt > 0
        routed = module.routed[step][0]
        debt -= min(routed, -(-round(1.1 * FACTOR * TOKENS * 1e6) // (E * 10**6))) - min(routed, BASE)
    assert debt <= 0
    assert module.live[-1] == FACTOR
    assert isinstance(module.live[-1], float)
    assert boosted == list(range(1, 1 + len(boosted)))
    assert boost.debts == {}
    assert boost.state_dict()["moe"]["repaid"][0] == 3 - debt


def test_what_experts_in_debt_get_is_taken_from_unused_capacity(tmp_path: Path) -> None:
    """Once they were watched, as much as they get; and no more than the largest use that was seen of each has left."""
    module, boost = Model(), CapacityBoost(0.2)
    fit(module, PartialRun(str(tmp_path), (1000, 0, 0, 0)), boost, steps=40)
    most, displaced = [0.0] * E, 0
    for step, live in enumerate(module.live):
        if step < WATCHED_STEPS:
            assert step == 0 or live == pytest.approx((1.2 * FACTOR, *[FACTOR] * (E - 1)))
        else:
            unused = sum(max(0.0, 1 - use) for use in most[1:])
            assert sum(live) == pytest.approx(E * FACTOR - max(0.0, 0.2 - unused) * FACTOR)
            assert live[0] == pytest.approx(1.2 * FACTOR)
            assert all(FACTOR * min(1.0, use) - 1e-9 <= each for each, use in zip(live[1:], most[1:], strict=True))
            slots = [-(-round(each * TOKENS * 1e6) // (E * 10**6)) for each in live]
            displaced += sum(max(0, min(n, BASE) - s) for n, s in zip(module.routed[step], slots, strict=True))
        most = [max(USE_DECAY * use, n / BASE) for use, n in zip(most, module.routed[step], strict=True)]
    assert boost.displaced == displaced
    assert boost.displaced < boost.repaid / 5


def test_debts_that_nothing_repays_expire(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An expert that does not overflow gets nothing out of more capacity: after so many steps that is the end of it."""
    module, boost = Model(), CapacityBoost(within_steps=6)
    fit(module, PartialRun(str(tmp_path), (0, 0, 9, 0)), boost)
    assert [live == FACTOR for live in module.live] == [True, *[False] * 5, *[True] * 6]
    assert boost.debts == {}
    assert boost.state_dict()["moe"]["expired"] == [0, 0, 9, 0]
    assert "moe: 9 of 9 lost tokens were not made up for within 6 steps" in caplog.text


@pytest.mark.parametrize("beside", [None, "exact"])
def test_without_a_callback_that_loses_tokens_it_says_that_it_does_nothing(
    tmp_path: Path, beside: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether there is an exact one or none."""
    callbacks = [] if beside is None else [DenseCheckpoint(str(tmp_path), freeze_heap=False)]
    fit(Model(), CapacityBoost(), *callbacks, steps=2, default_root_dir=tmp_path)
    (warned,) = [record.getMessage() for record in caplog.records if "CapacityBoost" in record.getMessage()]
    assert ("no checkpoint callback" if beside is None else "DenseCheckpoint, which loses no token") in warned


class Tutel(Model):
    """A layer with one capacity, like Tutel's, and its own formula for it."""

    @override
    def configure_model(self) -> None:
        if self.moe is None:
            self.moe = load_standin().MOELayer(D, capacity_factor=1.0)
            with torch.no_grad():
                self.moe.gates[0].wg.weight.copy_(torch.tensor([3.0, 2.5, -4.0, -4.0])[:, None].expand(E, D))  # type: ignore[index, union-attr]

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        layer: Any = self.moe
        loss: Tensor = (layer(batch[0]) - batch[0]).square().mean()
        self.live.append(layer.gates[0].capacity_factor)
        self.routed.append(layer.gates[0](batch[0]).topk(2).indices.flatten().bincount(minlength=E).tolist())
        return loss


def test_tutels_extra_tokens_are_those_beyond_its_capacity_without_boost(tmp_path: Path) -> None:
    """Of an expert that does not overflow there are none, though the factor is larger; nobody gives any."""
    module, boost = Tutel(), CapacityBoost(0.2)
    fit(module, PartialRun(str(tmp_path), (10**6, 0, 9, 0)), boost)
    paid, base = [0] * E, 2 * int(1.0 * TOKENS / E)
    for live, routed in zip(module.live, module.routed, strict=True):
        slots = 2 * int(live * TOKENS / E)
        paid = [a + max(0, min(n, slots) - base) for a, n in zip(paid, routed, strict=True)]
    assert module.live[1:] == [1.2] * 11
    assert boost.state_dict()["moe"]["repaid"] == [paid[0], 0, paid[2], 0]
    assert paid[0] > 0
    assert boost.displaced == 0


def test_without_a_loss_nothing_is_different(tmp_path: Path) -> None:
    """Bit for bit with and without the callback, and beside a callback that has no accounting."""
    runs = []
    for name, lost in (("none", None), ("boost", (0, 0, 0, 0))):
        module = Model()
        callbacks = [] if lost is None else [CapacityBoost()]
        fit(module, PartialRun(str(tmp_path / name), (0, 0, 0, 0)), *callbacks)
        runs.append((weights(module), module.live, module.routed))
        assert set(module.live) == {FACTOR}
    exact, boost = Model(), CapacityBoost()
    fit(exact, DenseCheckpoint(str(tmp_path / "exact"), freeze_heap=False), boost)
    runs.append((weights(exact), exact.live, exact.routed))
    assert boost.state_dict() == {}
    assert all(same(runs[0][0], run[0]) and runs[0][1:] == run[1:] for run in runs[1:])


def test_a_loss_makes_a_difference(tmp_path: Path) -> None:
    """The comparison above can fail: with debts the same run ends elsewhere."""
    with_debts, without = Model(), Model()
    fit(with_debts, PartialRun(str(tmp_path / "a"), (5, 0, 0, 0)), CapacityBoost())
    fit(without, PartialRun(str(tmp_path / "b"), (5, 0, 0, 0)))
    assert not same(weights(with_debts), weights(without))


def test_debts_survive_a_further_crash(tmp_path: Path) -> None:
    """In the middle of repaying: debts, raised capacity and the end are those of a run that was not interrupted."""
    whole, boost = Model(), CapacityBoost()
    fit(whole, PartialRun(str(tmp_path / "whole"), (4, 0, 0, 0)), boost)
    first = CapacityBoost()
    with pytest.raises(RuntimeError, match="crash"):
        fit(Model(fail_at=3), PartialRun(str(tmp_path / "run"), (4, 0, 0, 0)), first)
    second, again = Model(), CapacityBoost()
    fit(second, checkpoint := PartialRun(str(tmp_path / "run"), (4, 0, 0, 0)), again)
    assert checkpoint.report.resumed_from == 3
    assert second.live == whole.live[-len(second.live) :]
    assert second.live[0] != FACTOR, "it resumed while capacity was raised"
    assert same(weights(second), weights(whole))
    assert again.state_dict() == boost.state_dict()


def test_another_loss_adds_to_the_debts(tmp_path: Path) -> None:
    """What is repaid stays repaid, what the accounting has lost in all is owed less that."""
    fit(Model(), PartialRun(str(tmp_path), (3, 0, 0, 0)), first := CapacityBoost(), steps=8)
    repaid = first.state_dict()["moe"]["repaid"][0]
    assert repaid >= 3
    seen: list[dict[str, tuple[int, ...]]] = []

    class Look(Callback):
        @override
        def on_train_batch_start(self, *args: object) -> None:
            seen.append(second.debts)

    fit(Model(), PartialRun(str(tmp_path), (900, 0, 7, 0)), second := CapacityBoost(), Look(), steps=10)
    assert seen[0] == {"moe": (900 - repaid, 0, 7, 0)}


def test_what_is_owed_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a line at the start and at the end, and as a column of the logs."""
    logger = CSVLogger(str(tmp_path / "logs"))
    with caplog.at_level(logging.INFO, logger="lightning_moe_ckpt"):
        fit(
            Model(),
            PartialRun(str(tmp_path / "run"), (3, 0, 0, 0)),
            CapacityBoost(),
            logger=logger,
            log_every_n_steps=1,
        )
    assert "moe: 1 experts have 3 tokens to make up for, and get 10% more capacity" in caplog.text
    assert "moe: 3 of 3 lost tokens are made up for, and 0 others were dropped for it" in caplog.text
    header = (Path(logger.log_dir) / "metrics.csv").read_text().partition("\n")[0]
    assert {f"moe/boost_{name}" for name in ("debt", "repaid", "displaced")} <= set(header.split(","))


def test_layers_that_drop_nothing_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is no capacity to raise."""
    fit(module := Model(factor=0.0), PartialRun(str(tmp_path), (3, 0, 0, 0)), CapacityBoost(), steps=2)
    assert module.live == [0.0, 0.0]
    assert "['moe'] drop no tokens: what their experts have lost is not made up for" in caplog.text


@pytest.mark.parametrize("boost", [0.0, -0.1, 11.0])
def test_a_boost_out_of_range_is_refused(boost: float) -> None:
    """As the caller wrote it."""
    with pytest.raises(ConfigurationError, match=rf"CapacityBoost\(boost={boost}\)"):
        CapacityBoost(boost)


# -- expert parallel


def test_expert_parallel_ranks_agree(tmp_path: Path) -> None:
    """Two ranks with different tokens set the same capacities at the same steps, and repay together."""

    def work(rank: int) -> tuple[list[Any], dict[str, Any]]:
        module, boost = Model(), CapacityBoost()
        strategy = MoEStrategy(expert_parallel=2)
        fit(module, PartialRun(str(tmp_path), (9, 0, 0, 0)), boost, strategy=strategy, devices=2, steps=6)
        return module.live, boost.state_dict()

    first, second = run_world(2, work, process_group=False, timeout=timedelta(seconds=120))
    assert first == second
    assert any(live != FACTOR for live in first[0])
    assert first[1]["moe"]["repaid"][0] > 0


# -- Hugging Face Switch


class Switch(LightningModule):
    """Its router counts per sequence, and compares with one capacity or with one per expert."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import SwitchTransformersConfig
        from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

        config = SwitchTransformersConfig(
            d_model=D, d_ff=8, num_experts=E, expert_capacity=4, router_jitter_noise=0.0, router_dtype="float32"
        )
        self.moe = SwitchTransformersSparseMLP(config)
        with torch.no_grad():
            self.moe.router.classifier.weight.copy_(torch.tensor([3.0, 2.5, -4.0, -4.0])[:, None].expand(E, D))
        self.kept: list[list[list[int]]] = []
        self.live: list[Any] = []
        self.moe.router.register_forward_hook(lambda _m, _a, out: self.kept.append(out[0].sum(-2).tolist()))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        capacity = self.moe.router.expert_capacity
        self.live.append(torch.as_tensor(capacity).tolist())
        x_BSD = batch[0].view(2, -1, D)
        loss: Tensor = (self.moe(x_BSD) - x_BSD).square().mean()
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_switch_gets_one_more_place_per_sequence_until_it_has_repaid(tmp_path: Path) -> None:
    """A tenth more of 4 is 5; paid are the tokens beyond 4 in each sequence; then the capacity is 4 again."""
    module, boost = Switch(), CapacityBoost()
    fit(module, PartialRun(str(tmp_path), (3, 0, 0, 0)), boost)
    boosted = [i for i, live in enumerate(module.live) if live != 4]
    assert boosted
    assert all(module.live[step][0] == 5 for step in boosted)
    paid = sum(max(sequence[0] - 4, 0) for sequences in module.kept for sequence in sequences)
    assert paid >= 3
    assert module.live[-1] == 4
    assert boost.state_dict()["moe"] == {"lost": [3, 0, 0, 0], "repaid": [paid, 0, 0, 0], **NO_BOOST}


# -- layers that drop nothing


class Mixtral(LightningModule):
    """Hugging Face's block: stacked experts, a router of a known family."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        config = MixtralConfig(hidden_size=D, intermediate_size=8, num_local_experts=E, num_experts_per_tok=2)
        make: Any = MixtralSparseMoeBlock
        self.moe = make(config)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.moe.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.chosen: list[list[int]] = []
        self.moe.experts.register_forward_pre_hook(
            lambda _m, args: self.chosen.append(torch.bincount(args[1].flatten(), minlength=E).tolist())
        )

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x_BSD = batch[0].view(2, -1, D)
        loss: Tensor = (self.moe(x_BSD) - x_BSD).square().mean()
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_nearly_chosen_experts_repay_where_nothing_is_dropped(tmp_path: Path) -> None:
    """A tenth more tokens, exactly, while there is a debt; every token still has two experts; then none is moved."""
    plain, boosted, boost = Mixtral(), Mixtral(), CapacityBoost(dropless=True)
    fit(plain, PartialRun(str(tmp_path / "plain"), (0, 0, 0, 0)), boost)
    fit(boosted, PartialRun(str(tmp_path / "boosted"), (0, 5, 0, 0)), boost)
    debt = 5
    for usual, found in zip(plain.chosen, boosted.chosen, strict=True):
        assert sum(found) == 2 * TOKENS
        extra = -(-usual[1] // 10) if debt > 0 else 0
        assert found[1] - usual[1] == extra
        debt -= extra
        assert extra or found == usual
    assert debt <= 0
    assert boost.debts == {}


def test_spread_over_ranks_the_same_tokens_are_moved(tmp_path: Path) -> None:
    """Each rank moves its own before they travel, as if it had all experts; the ranks repay together."""

    def work(rank: int, ep_size: int) -> tuple[list[list[int]], dict[str, Any]]:
        module, boost = Mixtral(), CapacityBoost(dropless=True)
        strategy = MoEStrategy(expert_parallel=ep_size)
        callbacks = PartialRun(str(tmp_path / str(ep_size)), (0, 9, 0, 0)), boost
        fit(module, *callbacks, strategy=strategy, devices=2, steps=6)
        return module.chosen, boost.state_dict()

    whole, spread = (
        run_world(2, partial(work, ep_size=ep_size), process_group=False, timeout=timedelta(seconds=120))
        for ep_size in (1, 2)
    )
    assert spread == whole
    assert spread[0][0] != spread[1][0], "they have other tokens"
    assert spread[0][1] == spread[1][1]
    assert spread[0][1]["moe"]["repaid"][1] >= 9


def test_without_being_asked_layers_that_drop_nothing_are_left_alone(tmp_path: Path) -> None:
    """It is an extension, and off."""
    plain, left = Mixtral(), Mixtral()
    fit(plain, PartialRun(str(tmp_path / "plain"), (0, 0, 0, 0)), steps=3)
    fit(left, PartialRun(str(tmp_path / "left"), (0, 5, 0, 0)), CapacityBoost(), steps=3)
    assert left.chosen == plain.chosen


class DeepSeek(Mixtral):
    """Hugging Face's block, whose router has a bias only to choose by."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3 import modeling_deepseek_v3

        config = DeepseekV3Config(
            hidden_size=D, moe_intermediate_size=8, n_routed_experts=E, num_experts_per_tok=2, n_group=1, topk_group=1
        )
        make: Any = modeling_deepseek_v3.DeepseekV3MoE
        self.moe = make(config)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.moe.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.chosen: list[list[int]] = []
        self.moe.experts.register_forward_pre_hook(
            lambda _m, args: self.chosen.append(torch.bincount(args[1].flatten(), minlength=E).tolist())
        )


def test_a_term_beside_the_bias_repays_and_goes(tmp_path: Path) -> None:
    """Paid is what the router would not have chosen in the same forward; the trained bias keeps its bits."""
    plain, nudged, boost = DeepSeek(), DeepSeek(), CapacityBoost(0.5, dropless=True)
    bias = nudged.moe.gate.e_score_correction_bias.clone()
    fit(plain, PartialRun(str(tmp_path / "plain"), (0, 0, 0, 0)), steps=20)
    fit(nudged, PartialRun(str(tmp_path / "nudged"), (0, 5, 0, 0)), boost, steps=20)
    debt, steps = 5, 0
    for usual, found in zip(plain.chosen, nudged.chosen, strict=True):
        assert sum(found) == 2 * TOKENS
        if debt <= 0:
            assert found == usual
            continue
        debt, steps = debt - (found[1] - usual[1]), steps + 1
    assert debt <= 0
    assert 1 < steps < 20
    assert boost.state_dict()["moe"] == {"lost": [0, 5, 0, 0], "repaid": [0, 5 - debt, 0, 0], **NO_BOOST}
    assert torch.equal(nudged.moe.gate.e_score_correction_bias, bias)


@given(st.integers(0, 2**32), st.integers(1, 3), st.sets(st.integers(0, 5), min_size=1, max_size=3))
def test_only_last_choices_move_and_by_the_quota(seed: int, top_k: int, debtors: set[int]) -> None:
    """Each debtor gains a quarter, or all there are to gain; no debtor loses, no token chooses an expert twice."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(12, 6, generator=generator)
    idx_TK = logits_TE.topk(top_k).indices
    moved_TK = reroute(logits_TE, idx_TK, sorted(debtors), 0.25)
    assert torch.equal(moved_TK[:, :-1], idx_TK[:, :-1])
    assert all(len(set(row)) == top_k for row in moved_TK.tolist())
    free = [t for t in range(12) if int(idx_TK[t, -1]) not in debtors]
    for expert in sorted(debtors):
        before, after = int((idx_TK == expert).sum()), int((moved_TK == expert).sum())
        could = [
            t
            for t in free
            if expert not in idx_TK[t] and (moved_TK[t, -1] == expert or moved_TK[t, -1] == idx_TK[t, -1])
        ]
        assert after - before == min(-(-before // 4), len(could))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe"])
def test_weights_follow_the_formula_of_the_family(family: str) -> None:
    """For choices as they are, they are the router's own; so for choices that were changed as well."""
    import importlib

    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    (name,) = [name for name in _FORMULAS if hasattr(module, name)]
    from transformers import AutoConfig

    sizes = {"hidden_size": D, "num_local_experts": E, "num_experts": E, "num_experts_per_tok": 2}
    router = getattr(module, name)(AutoConfig.for_model(family, **sizes))
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))
    logits_TE, weights_TK, idx_TK = router(torch.randn(9, D, generator=torch.Generator().manual_seed(5)))
    formula = _formula(router)
    assert formula is not None
    assert torch.allclose(route_weights(logits_TE, idx_TK, formula).to(weights_TK.dtype), weights_TK, atol=1e-6)


# -- arithmetic


def test_factors() -> None:
    """Debtors get the boost; who has room gives in proportion, and no more than it has."""
    assert boost_factors([5, 0, 0, 0], 0.1) == [1.1, 1.0, 1.0, 1.0]
    given = boost_factors([5, 0, 0, 0], 0.1, use_E=[1.2, 1.0, 0.8, 0.4], room_E=[100] * 4)
    assert given == [1.1, 1.0, pytest.approx(1 - 0.1 / 4), pytest.approx(1 - 0.3 / 4)]
    scarce = boost_factors([5, 5, 5, 0], 0.1, use_E=[1.0, 1.0, 1.0, 0.9], room_E=[100] * 4)
    assert scarce == [1.1, 1.1, 1.1, pytest.approx(0.9)]


def test_only_experts_in_debt_repay() -> None:
    """Extra tokens of others are not credit for a later loss."""
    debts = TokenDeficits.none(3).with_lost([5, 0, 2]).repay([3, 4, 2])
    assert (debts.repaid, debts.open) == ((3, 0, 2), (2, 0, 0))
    assert TokenDeficits.from_state(debts.to_state()) == debts
    assert debts.with_lost([5, 6, 2]).open == (2, 6, 0)
