"""`discover` finds operators in every supported layout, places each parameter once, and guesses nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_moe_ckpt.errors import UnknownLayout
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.operators import OperatorSet, discover
from lightning_moe_ckpt.parallel import ParallelGroups, set_current_groups


def assert_placed_once(operators: OperatorSet, module: nn.Module) -> None:
    """Slices of all operators tile every parameter."""
    tiles = defaultdict(list)
    for op in operators:
        for piece in op.slices:
            tiles[piece.fqn].append((piece.start, piece.stop))
    params = dict(module.named_parameters())
    assert set(tiles) == set(params)
    for fqn, param in params.items():
        covered = torch.zeros(param.numel(), dtype=torch.int64)
        for start, stop in tiles[fqn]:
            covered[start:stop] += 1
        assert torch.equal(covered, torch.ones_like(covered)), fqn


class Mlp(nn.Module):
    def __init__(self, dim: int = 4, hidden: int = 6) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x).relu())
        return result


class ListMoE(nn.Module):
    """Experts in a ModuleList, top-1."""

    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(4, num_experts, bias=False)
        self.experts = nn.ModuleList([Mlp() for _ in range(num_experts)])
        self.shared_experts = nn.ModuleList([Mlp() for _ in range(2)])
        self.shared_expert_gate = nn.Linear(4, 1)


class StackedExperts(nn.Module):
    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(num_experts, 4, 6))
        self.b1 = nn.Parameter(torch.randn(num_experts, 6))
        self.w2 = nn.Parameter(torch.randn(num_experts, 6, 4))


class StackedMoE(nn.Module):
    def __init__(self, num_experts: int = 3, experts_name: str = "experts") -> None:
        super().__init__()
        setattr(self, experts_name, StackedExperts(num_experts))
        self.router = nn.Linear(4, num_experts)


class Block(nn.Module):
    def __init__(self, moe: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attn = nn.MultiheadAttention(4, 2)
        self.mlp = Mlp() if moe is None else moe


class Gpt(nn.Module):
    """Embedding, blocks, norm and head, as every decoder has them."""

    def __init__(self, *moes: nn.Module | None, tie: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Block(moe) for moe in moes])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        if tie:
            self.head.weight = self.emb.weight


class Wrapper(nn.Module):
    """What a LightningModule does to its model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class OwnLayer(nn.Module):
    """Looks like `MoELayer` on expert-parallel rank `ep_rank`."""

    def __init__(self, num_experts: int = 4, ep_size: int = 1, ep_rank: int = 0) -> None:
        super().__init__()
        e = num_experts // ep_size
        self.num_experts, self.top_k = num_experts, 2
        self.local_expert_ids = range(ep_rank * e, (ep_rank + 1) * e)
        self.gate = nn.Linear(4, num_experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(e, 4, 6))
        self.w2 = nn.Parameter(torch.randn(e, 6, 4))
        self.tokens_per_expert = torch.zeros(num_experts, dtype=torch.int64)

    def expert_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield "w1", self.w1
        yield "w2", self.w2

    def expert_parallel_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.expert_parameters()

    def router_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.gate.named_parameters(prefix="gate")


# -- layouts


def test_a_dense_model_has_one_operator_per_block() -> None:
    """Without experts every block, the embedding, the norm and the head are operators."""
    model = Gpt(None, None)
    operators = discover(model)
    assert operators.names == ("emb", "blocks.0", "blocks.1", "norm", "head")
    assert operators.layers == ()
    assert_placed_once(operators, model)


def test_a_wrapped_model_is_not_one_giant_operator() -> None:
    """`self.model` of a LightningModule is opened."""
    assert discover(Wrapper(Wrapper(Gpt(None)))).names == (
        "model.model.emb",
        "model.model.blocks.0",
        "model.model.norm",
        "model.model.head",
    )
    plain = Wrapper(Wrapper(Mlp()))
    assert discover(plain).names == ("model.model.up", "model.model.down")


def test_sequential_blocks_are_found_by_repetition() -> None:
    """A Sequential is a list of blocks if it repeats a class with parameters."""
    repeats = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert discover(Wrapper(repeats)).names == ("model.0", "model.2")
    mixed = nn.ModuleDict({"stem": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), "blocks": repeats})
    assert discover(mixed).names == ("stem", "blocks.0", "blocks.2")


def test_direct_parameters_of_an_opened_module_are_grouped_under_it() -> None:
    """A class token beside the blocks belongs to no child."""
    model = Gpt(None)
    model.token = nn.Parameter(torch.zeros(4))
    operators = discover(model)
    assert set(operators.names) == {"root", "emb", "blocks.0", "norm", "head"}
    assert_placed_once(operators, model)


def test_experts_in_a_list() -> None:
    """Each expert is an operator; shared experts and their gate stay in the block."""
    model = Gpt(None, ListMoE())
    operators = discover(model)
    assert operators.names == (
        "emb",
        "blocks.0",
        "blocks.1",
        "blocks.1.mlp/router",
        "blocks.1.mlp/expert.0",
        "blocks.1.mlp/expert.1",
        "blocks.1.mlp/expert.2",
        "norm",
        "head",
    )
    shared = {s.fqn for s in operators["blocks.1"].slices if "shared" in s.fqn}
    assert len(shared) == 10
    expert = operators["blocks.1.mlp/expert.1"]
    assert {s.fqn.split(".")[4] for s in expert.slices} == {"1"}
    assert (expert.kind, expert.expert_idx, expert.layer) == ("expert", 1, "blocks.1.mlp")
    router = operators["blocks.1.mlp/router"]
    assert (router.kind, router.numel) == ("router", 12)
    assert_placed_once(operators, model)


def test_the_gate_of_a_shared_expert_is_no_router() -> None:
    """Not even where its input is as wide as there are experts."""
    operators = discover(Gpt(ListMoE(4)))
    assert operators.layers[0].router == ("blocks.0.mlp.gate.weight",)


def test_experts_in_a_dict_are_ordered_by_the_number_in_their_key() -> None:
    """`expert_10` comes after `expert_2`."""
    moe = ListMoE(11)
    moe.experts = nn.ModuleDict({f"expert_{j}": Mlp() for j in reversed(range(11))})  # type: ignore[assignment]
    layer = discover(moe).layers[0]
    assert layer.local_expert_ids == tuple(range(11))
    assert layer.experts[10][0].fqn.startswith("experts.expert_10.")


def test_experts_in_a_wrapper_find_the_router_beside_it() -> None:
    """Megatron and DeepSpeed put the list into another module."""
    moe = ListMoE()
    moe.experts = nn.ModuleDict({"local_experts": moe.experts})  # type: ignore[assignment]
    model = Gpt(moe)
    assert discover(model).layers[0].fqn == "blocks.0.mlp"
    assert_placed_once(discover(model), model)


def test_a_list_with_empty_places_holds_some_experts_of_all() -> None:
    """DeepSeek's reference code keeps `None` for experts of other ranks."""
    moe = ListMoE(4)
    moe.experts = nn.ModuleList([None, None, Mlp(), Mlp()])  # type: ignore[list-item]
    operators = discover(Gpt(moe), ep_size=2)
    layer = operators.layers[0]
    assert (layer.num_experts, layer.local_expert_ids, layer.holders) == (4, (2, 3), "expert_data")
    assert operators["blocks.0.mlp/expert.2"].holders == "expert_data"
    with pytest.raises(UnknownLayout, match="2 of 4 experts"):
        discover(Gpt(moe), ep_size=4)


def test_stacked_experts_become_intervals() -> None:
    """Expert j is row j of every stacked tensor, biases included."""
    model = Gpt(StackedMoE())
    operators = discover(model)
    pieces = {s.fqn.rpartition(".")[2]: s for s in operators["blocks.0.mlp/expert.2"].slices}
    assert [(n, s.start, s.stop, s.global_start, s.global_shape) for n, s in pieces.items()] == [
        ("w1", 48, 72, 48, (3, 4, 6)),
        ("b1", 12, 18, 12, (3, 6)),
        ("w2", 48, 72, 48, (3, 6, 4)),
    ]
    assert operators["blocks.0.mlp/router"].numel == 15
    assert_placed_once(operators, model)


def test_stacked_shared_experts_are_dense() -> None:
    """A rule by shape alone would take them for routed experts."""
    model = Gpt(StackedMoE(experts_name="shared_experts"))
    operators = discover(model)
    assert operators.names == ("emb", "blocks.0", "norm", "head")


def test_our_own_layer_is_found() -> None:
    """`MoELayer` of this package, as a user puts it into a block."""
    model = Gpt(MoELayer(4, 6, 3, top_k=1))
    operators = discover(model)
    layer = operators.layers[0]
    assert (layer.fqn, layer.num_experts, layer.top_k, layer.holders) == ("blocks.0.mlp", 3, 1, "stage")
    assert len(operators["blocks.0.mlp/expert.0"].slices) == 4
    assert_placed_once(operators, model)


def test_our_own_layer_on_an_expert_parallel_rank() -> None:
    """`MoELayer` built by rank 1 of 2 holds the second half of the experts."""
    set_current_groups(ParallelGroups(rank=1, world_size=2, ep_rank=1, ep_size=2))
    try:
        model = Gpt(MoELayer(4, 6, 4))
    finally:
        set_current_groups(None)
    operators = discover(model, ep_size=2)
    assert operators.layers[0].local_expert_ids == (2, 3)
    pieces = operators["blocks.0.mlp/expert.3"].slices
    assert [(s.start, s.global_start, s.global_shape[0]) for s in pieces] == [
        (24, 72, 4),
        (6, 18, 4),
        (24, 72, 4),
        (4, 12, 4),
    ]
    assert operators.fingerprint == discover(Gpt(MoELayer(4, 6, 4))).fingerprint
    assert_placed_once(operators, model)


def test_expert_parallel_coordinates_are_global() -> None:
    """Ranks number their experts alike and say where their rows lie in the whole tensor."""
    sets = [discover(Gpt(OwnLayer(4, 2, r)), ep_size=2) for r in range(2)]
    assert sets[0].layers[0].local_expert_ids == (0, 1)
    expert = sets[1]["blocks.0.mlp/expert.3"]
    assert [(s.start, s.stop, s.global_start, s.global_shape) for s in expert.slices] == [
        (24, 48, 72, (4, 4, 6)),
        (24, 48, 72, (4, 6, 4)),
    ]
    assert {op.name: op.holders for op in sets[1]}["blocks.0"] == "stage"
    assert expert.holders == "expert_data"


def test_one_local_expert_keeps_its_place_in_the_whole() -> None:
    """A stacked tensor with one row is complete on this rank, but not in the world."""
    operators = discover(OwnLayer(4, 4, 2), ep_size=4)
    piece = operators["root/expert.2"].slices[0]
    assert (piece.start, piece.stop, piece.global_start, piece.global_shape) == (0, 24, 48, (4, 4, 6))


def test_frozen_parameters_are_included() -> None:
    """A user may freeze and unfreeze; the operators stay the same."""
    model = Gpt(ListMoE())
    names = discover(model).names
    model.requires_grad_(requires_grad=False)
    assert discover(model).names == names


# -- sharing


def test_tied_weights_are_listed_once_under_their_first_name() -> None:
    """Head and embedding are one operator."""
    model = Gpt(None, tie=True)
    operators = discover(model)
    assert operators.names == ("emb", "blocks.0", "norm")
    assert [s.fqn for s in operators["emb"].slices] == ["emb.weight"]


def test_parameters_over_one_storage_are_one_operator() -> None:
    """Two `nn.Parameter` over the same bytes have two optimizer states, but must be captured together."""
    model = Gpt(None)
    model.head.weight = nn.Parameter(model.emb.weight.data)
    operators = discover(model)
    assert operators.names == ("emb", "blocks.0", "norm")
    assert [s.fqn for s in operators["emb"].slices] == ["emb.weight", "head.weight"]


def test_disjoint_pieces_of_one_storage_stay_apart() -> None:
    """A flat buffer under all parameters does not make one giant operator."""
    model = Gpt(None)
    flat = torch.cat([p.data.flatten() for p in model.parameters()])
    start = 0
    for p in model.parameters():
        p.data = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    assert discover(model).names == ("emb", "blocks.0", "norm", "head")


def test_experts_that_share_bytes_join() -> None:
    """Whole experts go to the first owner; with a dense parameter they go to it, since it is never skipped."""
    moe = ListMoE()
    first, second = moe.experts[0], moe.experts[1]
    assert isinstance(first, Mlp)
    assert isinstance(second, Mlp)
    second.up.weight = nn.Parameter(first.up.weight.data)
    operators = discover(Gpt(moe))
    assert any("experts.1.up" in s.fqn for s in operators["blocks.0.mlp/expert.0"].slices)
    second.up.weight = nn.Parameter(moe.shared_experts[0].up.weight.data)  # type: ignore[arg-type, union-attr]
    model = Gpt(moe)
    operators = discover(model)
    assert any(".experts.1.up" in s.fqn for s in operators["blocks.0"].slices)
    assert_placed_once(operators, model)


def test_stacked_experts_that_share_bytes_are_refused() -> None:
    """A row cannot be in two operators."""
    moe = StackedMoE()
    moe.other = nn.Parameter(moe.experts.w1.data)  # type: ignore[arg-type, union-attr]
    with pytest.raises(UnknownLayout, match=r"mlp.experts.w1.*share memory"):
        discover(Gpt(moe))


# -- identity


def test_the_fingerprint_is_the_same_on_all_ranks_and_at_any_expert_parallelism() -> None:
    """Records have global coordinates; so has the identity of the model."""
    whole = discover(Gpt(OwnLayer(4)))
    ranks = [discover(Gpt(OwnLayer(4, 2, r)), ep_size=2) for r in range(2)]
    assert whole.fingerprint == ranks[0].fingerprint == ranks[1].fingerprint
    assert whole.fingerprint == discover(Gpt(OwnLayer(4))).fingerprint


@pytest.mark.parametrize(
    "other",
    [Gpt(OwnLayer(8)), Gpt(None), Gpt(OwnLayer(4)).bfloat16(), Gpt(OwnLayer(4), None), Gpt(OwnLayer(4), tie=True)],
    ids=["experts", "dense", "dtype", "depth", "tied"],
)
def test_another_model_has_another_fingerprint(other: nn.Module) -> None:
    """What changes the meaning of a record changes the fingerprint."""
    assert discover(other).fingerprint != discover(Gpt(OwnLayer(4))).fingerprint


def test_lookups() -> None:
    """By name, and where counts begin by layer."""
    operators = discover(Gpt(ListMoE(), ListMoE(2)))
    assert operators.num_experts == 5
    assert operators.count_offsets == {"blocks.0.mlp": 0, "blocks.1.mlp": 3}
    assert "nothing" not in operators
    with pytest.raises(KeyError):
        operators["nothing"]
    with pytest.raises(ValueError, match="unique"):
        operators.with_operators([*operators, operators["emb"]])
