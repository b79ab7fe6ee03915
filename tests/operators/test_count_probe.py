"""One step proves token counts, or says of which layer they are wrong and why; with real layers, right and wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from campaign._models import MODEL_DIM, ListMoE
from launcher import run_world
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import WrongCounts
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.operators import (
    AttributeTap,
    CountProbe,
    CountTap,
    IndexTap,
    LoadCounter,
    MaskTap,
    MoELayerSpec,
    RowsTap,
    discover,
    prove_counts,
    register_adapter,
    whole_slice,
)
from lightning_moe_ckpt.operators.adapters import unregister_adapter
from lightning_moe_ckpt.operators.adapters._by_class import AdapterFactory
from lightning_moe_ckpt.parallel import ParallelGroups, build_groups
from lightning_moe_ckpt.planning._measures import CountProof
from operators._families import FAMILIES, nllb_moe

E, D, T = 4, 8, 32


class Experts(nn.Module):
    """Stacked experts; `shift` lets others run than those whose indices are given."""

    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(E, D, D)), nn.Parameter(torch.randn(E, D, D))
        self.shift = shift

    def forward(self, x_TD: Tensor, idx_T1: Tensor) -> Tensor:
        idx_T = (idx_T1[:, 0] + self.shift) % E
        return torch.einsum("td,tdf,tfe->te", x_TD, self.w1[idx_T], self.w2[idx_T].abs())


class Block(nn.Module):
    """Top-1 routing that never chooses the last expert; keeps a counter, on which it counts recomputation too."""

    top_k = 1

    def __init__(self, shift: int = 0, far: bool = False) -> None:
        super().__init__()
        self.gate, self.experts, self.far = nn.Linear(D, E), Experts(shift), far
        self.register_buffer("seen", torch.zeros(E, dtype=torch.int64), persistent=False)
        self.seen: Tensor

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_T1, idx_T1 = self.gate(x_TD)[:, : E - 1].softmax(-1).max(-1, keepdim=True)
        self.seen += torch.bincount(idx_T1[:, 0], minlength=E)
        out_TD: Tensor = self.experts(x_TD, idx_T1 + 2 * E * self.far) * weight_T1
        return out_TD


class Model(nn.Module):
    def __init__(self, block: nn.Module, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.moe, self.use_reentrant = block, use_reentrant

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.use_reentrant is None:
            out: Tensor = self.moe(x_TD)
        else:
            out = checkpoint(self.moe, x_TD, use_reentrant=self.use_reentrant)
        return out

    def step(self, rows: int = T, rest: int = 0) -> None:
        """Forward and backward, twice as in accumulation; the last `rest` rows take no part in the loss."""
        for _ in range(2):
            self(torch.randn(rows, D, requires_grad=True))[: rows - rest].square().sum().backward()


@contextmanager
def counted_by(tap: CountTap | None, cls: type[nn.Module] = Block) -> Iterator[None]:
    """An adapter for the block that believes `tap`."""

    def describe(fqn: str, module: nn.Module, index: Any) -> MoELayerSpec:
        unregister_adapter(cls)
        (spec,) = discover(module).layers
        register_adapter(cls, describe)
        moved = {
            expert: tuple(replace(piece, fqn=f"{fqn}.{piece.fqn}") for piece in pieces)
            for expert, pieces in spec.experts.items()
        }
        return replace(spec, fqn=fqn, experts=moved, router=tuple(f"{fqn}.{name}" for name in spec.router), count=tap)

    register_adapter(cls, describe)
    try:
        yield
    finally:
        unregister_adapter(cls)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_hugging_face_family_is_counted_right(name: str) -> None:
    """As they are built, with wider routers, and with both kinds of activation checkpointing."""
    tokens = torch.randint(1, 64, (2, 8))

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    for std, use_reentrant in ((0.0, None), (0.3, True), (0.3, False)):
        model: Any = FAMILIES[name][0]().train()
        for parameter in model.parameters() if std else ():
            nn.init.normal_(parameter, std=std)
        if use_reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        prove_counts(model, step)


@pytest.mark.parametrize("kernel", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_whatever_kernel_runs_the_experts(name: str, kernel: str) -> None:
    """Transformers exchange the forward of the experts' module, which is counted before it."""
    model: Any = FAMILIES[name][0]().train()
    model.set_experts_implementation(kernel)
    tokens = torch.randint(1, 64, (2, 8))

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    prove_counts(model, step)


@pytest.mark.parametrize("use_reentrant", [None, True, False])
@pytest.mark.parametrize("build", [Block, partial(MoELayer, D, 6, E, top_k=2, capacity_factor=0.5)])
def test_our_own_layer_and_stacked_experts_are_counted_right(
    build: Callable[[], nn.Module], use_reentrant: bool | None
) -> None:
    """Also where tokens are dropped over capacity, and where an expert gets none."""
    model = Model(build(), use_reentrant)
    prove_counts(model, model.step)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.moe.modules()), "hooks are left"


def failure(model: Model, **step: int) -> str:
    with pytest.raises(WrongCounts) as raised:
        prove_counts(model, lambda: model.step(**step))
    told = str(raised.value)
    assert "`moe` (" in told
    assert "Describe the layer with `register_adapter(" in told
    return told


def test_a_counter_that_counts_recomputation_is_found() -> None:
    """torchtitan's counts twice under activation checkpointing."""
    with counted_by(AttributeTap("moe", "seen")):
        prove_counts(model := Model(Block()), model.step)
        told = failure(Model(Block(), use_reentrant=False))
    assert f"{4 * T} were counted, where {2 * T} tokens with top-1 passed" in told


def test_experts_that_do_other_than_their_indices_are_found() -> None:
    """An expert has a gradient that by the counts got nothing."""
    assert "experts [3] have a gradient, and no token was counted for them" in failure(Model(Block(shift=1)))


def test_indices_that_name_no_expert_are_found() -> None:
    """Dropped slots are told from them."""
    assert f"{2 * T} indices are outside `[0, {E})`" in failure(Model(Block(far=True)))


def test_a_tap_that_sees_nothing_is_found() -> None:
    """A kernel in the experts' place, of which hooks know nothing."""
    with counted_by(RowsTap({0: "moe.gate.unused"})):
        model = Model(Block())
        model.moe.gate.add_module("unused", nn.Identity())  # type: ignore[union-attr]
        assert f"{2 * T} tokens passed and none was counted" in failure(model)


def test_a_router_that_its_experts_do_not_follow_is_found() -> None:
    """NLLB-MoE of transformers 5 itself, to an adapter that believes its router: it claims tokens for all experts."""
    model: Any = nllb_moe().train()
    ffn = "model.encoder.layers.0.ffn"
    cls = type(model.get_submodule(ffn))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)

    def describe(fqn: str, module: nn.Module, index: Any) -> MoELayerSpec:
        names = {expert: f"{fqn}.experts.expert_{expert}" for expert in range(4)}
        return MoELayerSpec(
            fqn=fqn,
            num_experts=4,
            local_expert_ids=tuple(names),
            experts={e: tuple(whole_slice(n, p) for n, p in index.under(name).items()) for e, name in names.items()},
            router=(f"{fqn}.router.classifier.weight",),
            count=MaskTap(f"{fqn}.router"),
        )

    factory: AdapterFactory = describe
    register_adapter(cls, factory)
    tokens = torch.randint(3, 64, (8, 32))
    try:
        with pytest.raises(WrongCounts, match=r"experts \[2, 3\] have no gradient, and \d+ tokens were counted for"):
            prove_counts(model, lambda: model(input_ids=tokens, labels=tokens).loss.backward())  # noqa: PLW0108  # runs it late
    finally:
        unregister_adapter(cls)


def test_experts_that_do_not_train_have_no_gradient() -> None:
    """Some of them, from the start: their tokens are right all the same."""
    moe = ListMoE(dropout=0.0, gate_fp32=False, noisy=False, never_routed=False)
    for param in moe.experts[:2].parameters():
        param.requires_grad = False
    x_TD = torch.randn(T, MODEL_DIM)
    prove_counts(nn.ModuleDict({"moe": moe}), lambda: moe(x_TD)[0].square().sum().backward())


def test_tokens_without_a_gradient_prove_nothing_against_an_expert() -> None:
    """Padding takes no part in the loss; experts that got nothing else have no gradient, and rightly so."""
    with counted_by(IndexTap("moe.experts")):
        model = Model(Block())
        prove_counts(model, lambda: model.step(rest=T - 1))


def test_without_tokens_nothing_is_proven() -> None:
    """Evaluation is not training; a layer that is not used is left alone after some steps."""
    model = Model(Block()).eval()
    with pytest.raises(WrongCounts, match="No token has passed"):
        prove_counts(model, model.step)
    probe = CountProbe(discover(model), model)
    probe.install()
    for _ in range(8):
        assert not probe.done
        assert probe.check() == []
    assert probe.done
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_probing_changes_no_bit() -> None:
    """Gradients and random numbers are those of a step that nobody watches."""
    model = Model(Block(), use_reentrant=False)
    torch.manual_seed(1)
    model.step()
    want, state = [p.grad for p in model.parameters()], torch.get_rng_state()
    torch.manual_seed(1)
    prove_counts(model, model.step)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(want, [p.grad for p in model.parameters()]))  # type: ignore[arg-type]  # noqa: B905
    assert torch.equal(torch.get_rng_state(), state)


def proof(
    model: Model,
    *,
    required: bool,
    groups: ParallelGroups | None = None,
    distrust: Callable[[Collection[str]], object] = tuple,
) -> CountProof:
    exchange = Exchange(groups or ParallelGroups())
    return CountProof(discover(model), model, exchange, required=required, distrust=distrust)


def batch_begins(watching: CountProof) -> None:
    watching.batch_begins(replaying=False, planned=False, last_step=None)


def test_where_counts_decide_nothing_they_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """A warning names the layer, its experts keep their order, and training goes on; it is judged once."""
    model = Model(Block(shift=1))
    counter = LoadCounter(discover(model), model)
    counter.install()
    left_out: list[str] = []

    def leave_out(layers: Collection[str]) -> None:
        left_out.extend(layers)
        counter.distrust(layers)

    watching = proof(model, required=False, distrust=leave_out)
    watching.batch_begins(replaying=True, planned=False, last_step=None)
    watching.before_step()
    assert not left_out, "nothing was watched yet: a replayed step"
    for _ in range(2):
        batch_begins(watching)
        model.step()
        watching.before_step()
        assert not counter.read_and_reset().any()
    assert caplog.text.count("not counted as its experts process them") == 1
    assert "restored is exact all the same" in caplog.text


def test_where_counts_decide_training_does_not_go_on() -> None:
    """Of another layer nothing is said."""
    model = Model(Block(shift=1))
    watching = proof(model, required=True)
    batch_begins(watching)
    model.step()
    with pytest.raises(WrongCounts, match="`moe`"):
        watching.before_step()


def test_counts_that_decide_have_to_be_there() -> None:
    """Before the first step."""
    with counted_by(None), pytest.raises(WrongCounts, match=r"Nothing counts the tokens of \['moe'\]"):
        proof(Model(Block()), required=True)


class Inside(Block):
    """A block whose parts are called by its owner, past its own forward."""

    def step(self, rows: int = T) -> None:
        loss: Any = self.forward(torch.randn(rows, D)).square().sum()
        loss.backward()


def test_a_block_that_is_never_called_is_judged_by_its_gradients() -> None:
    """A LightningModule that is one: its `training_step` does the routing."""
    right, wrong = Inside(), Inside(shift=1)
    prove_counts(right, right.step)
    with pytest.raises(WrongCounts, match=r"`root` \(Inside\).*experts \[3\] have a gradient"):
        prove_counts(wrong, wrong.step)


@pytest.mark.parametrize(("called", "zeroed"), [(True, False), (False, False), (True, True)])
def test_a_gradient_of_an_earlier_step_proves_nothing(called: bool, zeroed: bool) -> None:
    """A restart restores what the user has not zeroed; where its step zeroes first, as most do, all is judged."""
    model: Any = Model(Block(shift=1)) if called else Inside(shift=1)
    for name, param in model.named_parameters():
        if "experts" in name:
            param.grad = torch.ones_like(param)
    watching = proof(model, required=True)
    batch_begins(watching)
    if zeroed:
        model.zero_grad()
        model.step()
        with pytest.raises(WrongCounts, match=r"experts \[3\] have a gradient"):
            watching.before_step()
    else:
        model.step()
        watching.before_step()


def two_ranks(rank: int) -> str:
    groups = build_groups()
    torch.manual_seed(rank)
    model = Model(Block(shift=rank))
    watching = proof(model, required=True, groups=groups)
    batch_begins(watching)
    model.step()
    try:
        watching.before_step()
    except WrongCounts as error:
        return str(error)
    return "no error"


@pytest.mark.timeout(120)
def test_what_one_rank_finds_ends_the_fit_on_all() -> None:
    """Else the others would wait for it."""
    told = run_world(2, two_ranks)
    assert told[0] == told[1]
    assert "rank 1: The tokens of `moe`" in told[0]
