"""Stacked experts of Hugging Face, spread over ranks: the model computes what it computed whole, and every rank reaches every exchange."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import run_world
from operators._families import FAMILIES, SPREAD, balanced, dbrx, llama4, mixtral, nllb_moe, switch
from torch import Tensor, nn

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.moe import MoELayer, spread_experts
from lightning_moe_ckpt.operators import LoadCounter, discover
from lightning_moe_ckpt.parallel import (
    GradientReducer,
    ParallelGroups,
    build_groups,
    expert_parallel_fqns,
    set_current_groups,
)

E = 12
LIMIT = timedelta(seconds=60)
ALL = [*SPREAD.values()]
WORLDS = [
    (3, 3, ALL),
    (4, 2, ["gpt_oss", "deepseek_v3"]),
    *(pytest.param(*world, ALL, marks=pytest.mark.soak) for world in [(4, 2), (4, 4), (3, 1)]),
]
WAYS = ("grouped_mm", "eager", "batched_mm")
"""Ways in which transformers computes experts; the first is its default."""


def build(name: str, way: str = "grouped_mm", **more: Any) -> Any:
    """A family's model with weights large enough for all gradients to matter; equal in every process."""
    torch.manual_seed(3)
    model = balanced(name, E, **more)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.set_experts_implementation(way)
    return model


def batch(rank: int) -> Tensor:
    """Ranks have different numbers of tokens."""
    return torch.randint(1, 64, (2, 5 + 2 * rank), generator=torch.Generator().manual_seed(rank))


@dataclass
class Step:
    """What one rank sees of one forward and backward."""

    outputs: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    sharded: set[str]
    counts: Tensor


def outputs_of(out: Any) -> dict[str, Tensor]:
    """All that a model returns: logits, losses, the routers' logits of each layer."""
    found = {name: out[name].detach() for name in ("loss", "logits", "aux_loss") if out.get(name) is not None}
    for layer, logits in enumerate(out.get("router_logits") or ()):
        found[f"router {layer}"] = logits.detach()
    return found


def train_step(rank: int, groups: ParallelGroups, model: Any) -> Step:
    """One step of a spread model on this rank's batch."""
    spread_experts(model)
    sharded = expert_parallel_fqns(model)
    counter = LoadCounter(discover(model, ep_size=groups.ep_size), model)
    counter.install()
    reducer = GradientReducer(model.named_parameters(), groups=groups, is_expert_parallel=sharded, bucket_nbytes=5000)
    reducer.prepare(sync=True)
    out = model(input_ids=batch(rank), labels=batch(rank))
    out.loss.backward()
    reducer.finish()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return Step(outputs_of(out), grads, sharded, counter.read_and_reset())


def recomputing(model: Any) -> Any:
    """The model with the library's own switch for recomputing activations."""
    switch_on = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    switch_on()
    return model


def steps_of(rank: int, ep_size: int, name: str, way: str) -> list[Step]:
    """Three equal steps, one of which recomputes activations."""
    groups = build_groups(ep_size, LIMIT)
    set_current_groups(groups)
    made = [build(name, way), build(name, way), recomputing(build(name, way))]
    return [train_step(rank, groups, model.train()) for model in made]


def whole_step(world_size: int, model: Any) -> tuple[list[Step], dict[str, Tensor]]:
    """All ranks' batches through a whole model in one process: a step for each, and the mean of the gradients."""
    set_current_groups(None)
    counter = LoadCounter(discover(model), model)
    counter.install()
    steps, losses = [], []
    for rank in range(world_size):
        out = model(input_ids=batch(rank), labels=batch(rank))
        losses.append(out.loss)
        steps.append(Step(outputs_of(out), {}, set(), counter.read_and_reset()))
    torch.autograd.backward(torch.stack(losses).mean())
    return steps, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def whole_gradient(steps: list[Step], ep_size: int, name: str) -> Tensor:
    """Of all experts, from the first expert-parallel group; of a dense parameter, from the first rank."""
    parts = [part for step in steps[:ep_size] if (part := step.grads[name]) is not None]
    return torch.cat(parts) if name in steps[0].sharded else parts[0]


def same(left: Step, right: Step) -> bool:
    """Whether two steps have equal bits."""
    grads = all(
        torch.equal(left.grads[name], grad)  # type: ignore[arg-type]  # both have it or none
        for name, grad in right.grads.items()
        if grad is not None or left.grads[name] is not None
    )
    return grads and all(torch.equal(left.outputs[name], value) for name, value in right.outputs.items())


@pytest.mark.parametrize(("world_size", "ep_size", "names"), WORLDS)
def test_a_spread_model_computes_what_the_whole_one_does(world_size: int, ep_size: int, names: list[str]) -> None:
    """Outputs, losses with the balancing one, routers' logits and gradients to rounding, counts exactly, in every family; bits are equal
    in two steps, and with recomputed activations.
    """
    ways = {name: WAYS[(number + world_size) % 3] for number, name in enumerate(names)}

    def work(rank: int) -> dict[str, list[Step]]:
        return {name: steps_of(rank, ep_size, name, ways[name]) for name in names}

    for name in names:
        build(name)  # imports its module for all ranks
    results = run_world(world_size, work, timeout=timedelta(seconds=120))
    for name in names:
        wanted, grads = whole_step(world_size, build(name, ways[name]).train())
        found = [result[name][0] for result in results]
        assert {*found[0].sharded} == {fqn for fqn in grads if ".experts." in fqn and ep_size > 1}
        for rank, (step, want) in enumerate(zip(found, wanted, strict=True)):
            assert step.outputs.keys() == want.outputs.keys()
            for key, value in want.outputs.items():
                torch.testing.assert_close(step.outputs[key], value, rtol=1e-4, atol=1e-4, msg=f"{name}: {key}")
            assert torch.equal(step.counts, want.counts), f"{name}: its own tokens, over all experts"
            for other in results[rank][name][1:]:
                assert same(step, other), name
        for fqn, grad in grads.items():
            torch.testing.assert_close(whole_gradient(found, ep_size, fqn), grad, rtol=1e-4, atol=1e-5, msg=fqn)


def test_double_precision_stays_double() -> None:
    """To its own rounding, without a sum in less precision."""

    def work(rank: int) -> Step:
        groups = build_groups(2, LIMIT)
        set_current_groups(groups)
        return train_step(rank, groups, build("mixtral", "eager").double())

    found = run_world(2, work)
    wanted, _ = whole_step(2, build("mixtral", "eager").double())
    for step, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(step.outputs["logits"], want.outputs["logits"], rtol=1e-12, atol=1e-12)


def test_a_rank_whose_experts_get_no_tokens_takes_part() -> None:
    """All tokens go to the first two experts; those of other ranks have gradients of zero, frozen ones none, and nobody waits."""

    def gradients(rank: int, way: str) -> list[str]:
        model = build("gpt_oss", way)
        spread_experts(model)
        for layer in model.model.layers:
            layer.mlp.router.bias.data[:2] += 1e4
        experts_of(model).down_proj_bias.requires_grad_(False)
        model(input_ids=batch(rank), labels=batch(rank)).loss.backward()
        experts = [p for name, p in model.named_parameters() if ".experts." in name]
        return ["none" if p.grad is None else "some" if p.grad.any() else "zero" for p in experts]

    def work(rank: int) -> list[list[str]]:
        set_current_groups(build_groups(3, LIMIT))
        return [gradients(rank, way) for way in WAYS]

    first, *others = run_world(3, work)
    assert first == [["some"] * 3 + ["none"] + ["some"] * 4] * 3
    assert others == [[["zero"] * 3 + ["none"] + ["zero"] * 4] * 3] * 2


def test_freezing_anything_anywhere_never_makes_ranks_diverge() -> None:
    """Each step freezes another mix of parameters on each rank; the input has no gradient, and activations are recomputed in half of the steps."""

    def work(rank: int) -> int:
        groups = build_groups(3, LIMIT)
        set_current_groups(groups)
        done = 0
        for step in range(8):
            model = build("mixtral").train()
            spread_experts(model)
            if step % 2:
                recomputing(model)
            for position, parameter in enumerate(model.parameters()):
                parameter.requires_grad_((position + rank * step) % 3 != 0 and step != 5)
            reducer = GradientReducer(
                model.named_parameters(),
                groups=groups,
                is_expert_parallel=expert_parallel_fqns(model),
                bucket_nbytes=500,
            )
            reducer.prepare(sync=True)
            model(input_ids=batch(rank), labels=batch(rank)).loss.backward()
            reducer.finish()
            done += 1
        return done

    assert run_world(3, work) == [8, 8, 8]


# -- without other ranks


@pytest.fixture
def second_of_three() -> Any:
    """The place of rank 1, as of a process that has no groups yet."""
    set_current_groups(ParallelGroups.placed(1, 3, ep_size=3))
    yield
    set_current_groups(None)


def experts_of(model: Any) -> Any:
    return model.model.layers[0].mlp.experts


@pytest.mark.usefixtures("second_of_three")
def test_rows_of_this_rank_stay_in_the_same_parameters() -> None:
    """With their attributes, and memory for no more; a second call does nothing, and copies are spread like the original."""
    model, whole = build("gpt_oss"), build("gpt_oss")
    kept = dict(model.named_parameters())
    kept["model.layers.0.mlp.experts.down_proj"].requires_grad_(False).mark = "mine"
    assert spread_experts(model) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert spread_experts(model) == []
    for name, parameter in model.named_parameters():
        assert parameter is kept[name]
        want = whole.get_parameter(name)
        assert torch.equal(parameter, want[4:8] if ".experts." in name else want)
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    down = experts_of(model).down_proj
    assert not down.requires_grad
    assert down.mark == "mine"
    for copied in (copy.deepcopy(experts_of(model)), pickle.loads(pickle.dumps(experts_of(model)))):  # noqa: S301  # our own
        assert type(copied) is type(experts_of(model))
        assert copied.local_expert_ids == range(4, 8)
        assert torch.equal(copied.down_proj, down)
        assert spread_experts(copied) == []


@pytest.mark.usefixtures("second_of_three")
def test_a_model_on_the_meta_device_is_spread() -> None:
    """So weights can be read into the parts that are needed."""
    with torch.device("meta"):
        model = mixtral(E)
    spread_experts(model)
    assert experts_of(model).gate_up_proj.shape == (4, 48, 16)
    assert experts_of(model).gate_up_proj.is_meta


@pytest.mark.usefixtures("second_of_three")
def test_operators_are_named_as_in_the_whole_model() -> None:
    """Experts of this rank by their global index."""
    model = build("deepseek_v3")
    set_current_groups(None)
    whole = {op.name for op in discover(model)}
    set_current_groups(ParallelGroups.placed(1, 3, ep_size=3))
    spread_experts(model)
    found = discover(model, ep_size=3)
    (layer,) = found.layers
    assert layer.local_expert_ids == (4, 5, 6, 7)
    assert (layer.num_experts, layer.holders, layer.top_k) == (E, "expert_data", 2)
    others = {f"{layer.prefix}/expert.{index}" for index in range(E) if index not in layer.local_expert_ids}
    assert {op.name for op in found} == whole - others


def test_with_every_expert_on_every_rank_nothing_changes() -> None:
    """No group, no new class."""
    set_current_groups(None)
    model = build("mixtral")
    before = type(experts_of(model))
    assert spread_experts(model) == []
    assert type(experts_of(model)) is before


@pytest.mark.usefixtures("second_of_three")
def test_layers_of_this_package_stay_as_they_are() -> None:
    """They were built for this rank."""
    layer = MoELayer(4, 4, 3)
    assert spread_experts(nn.Sequential(layer)) == []
    assert type(layer) is MoELayer


def tied() -> Any:
    model: Any = mixtral(3)
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj = first.down_proj
    return model


def adapted() -> Any:
    import peft  # type: ignore[import-not-found, unused-ignore]

    config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by a name that is about to go
        return peft.get_peft_model(mixtral(3), config)


def with_norm() -> Any:
    model: Any = mixtral(3)
    model.model.layers[1].mlp.experts.norm = nn.LayerNorm(3)
    return model


def by_transformers() -> Any:
    model: Any = mixtral(3)
    experts_of(model)._is_expert_parallel = True
    return model


REFUSALS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "uneven": (
        mixtral,
        r"`model.layers.0.mlp.experts` \(MixtralExperts\) has 4 experts, .* Choose a number of ranks that divides",
    ),
    "switch": (switch, r"\(SwitchTransformersExperts\) keeps its experts in a way that `expert_parallel=3` cannot cut"),
    "llama4": (llama4, r"feed_forward.experts` \(Llama4TextExperts\) keeps its experts"),
    "nllb": (nllb_moe, r"\(NllbMoeExperts\) keeps its experts"),
    "dbrx": (dbrx, r"\(DbrxExperts\) keeps its experts"),
    "tied": (tied, r"layers.0.mlp.experts` \(MixtralExperts\) shares parameters with another module. Untie"),
    "adapted": (adapted, r"is adapted by PEFT \(`target_parameters`\), .* adapt other layers"),
    "norm": (
        with_norm,
        r"layers.1.mlp.experts` .* has parameters or buffers beside those with a row for each of 3 experts",
    ),
    "spread": (by_transformers, "is spread by transformers itself. Load the model without"),
}


@pytest.mark.usefixtures("second_of_three")
@pytest.mark.parametrize("name", REFUSALS)
def test_experts_that_cannot_be_spread_are_refused_by_name(name: str) -> None:
    """Before anything is cut."""
    make, words = REFUSALS[name]
    model = make()
    shapes = [p.shape for p in model.parameters()]
    with pytest.raises(ConfigurationError, match=f"(?s){words}"):
        spread_experts(model)
    assert [p.shape for p in model.parameters()] == shapes


def test_another_number_of_ranks_is_refused(second_of_three: None) -> None:
    """A model that an earlier Trainer has spread holds a part of the experts; so does it outside of a Trainer."""
    model = build("mixtral")
    spread_experts(model)
    set_current_groups(None)
    with pytest.raises(
        ConfigurationError, match=r"holds experts for `expert_parallel=3`, the strategy has `expert_parallel=1`. Build"
    ):
        spread_experts(model)
    with pytest.raises(
        ConfigurationError, match="SpreadMixtralExperts was built for `expert_parallel=3`, but 1 is in force"
    ):
        model(input_ids=batch(0))


# -- documentation


def test_the_documentation_names_the_families_that_are_tested() -> None:
    """The table of docs/models.md has these, and those that are refused above."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    table = page.partition("| Hugging Face family |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", table, re.MULTILINE)
    spread = {name.strip() for names, how in rows if how == "spread" for name in names.split(",")}
    assert spread == set(SPREAD)
    refused = {name.strip() for names, how in rows if how == "refused" for name in names.split(",")}
    assert refused >= {"Switch", "NLLB-MoE", "Llama 4", "DBRX"}


def test_all_families_with_stacked_experts_that_are_tested_elsewhere_can_be_spread() -> None:
    """Nobody is refused by accident."""
    set_current_groups(ParallelGroups.placed(1, 2, ep_size=2))
    try:
        for name in ("granite_moe", "granite_moe_shared", *SPREAD.values()):
            assert spread_experts(FAMILIES[name][0]())
    finally:
        set_current_groups(None)
