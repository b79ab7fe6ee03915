"""Runs under `ModelParallelStrategy`, whose ranks store shards, are exported and verified as one model."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from door import CheckpointCallback
from launcher import run_world
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from inspection._runs import FEATURES, train
from inspection.test_boxes import same
from inspection.test_export import markers_of
from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.inspection import verify
from lightning_moe_ckpt.storage import open_backend

WIDTH, EXPERTS = 8, 4


class Stacked(nn.Module):
    """Experts as rows of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, 6) * 0.1)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, 6, WIDTH) * 0.1)

    def forward(self, x_TD: Tensor, topk_idx_TK: Tensor, weight_TK: Tensor) -> Tensor:
        weight_TE = x_TD.new_zeros(len(x_TD), EXPERTS).scatter(-1, topk_idx_TK, weight_TK)
        h_ETH = torch.einsum("td,edh->eth", x_TD, self.w1).relu()
        return torch.einsum("eth,ehd,te->td", h_ETH, self.w2, weight_TE)


class Experts(nn.Module):
    """A router and experts, the best two of which get each row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Stacked()

    def forward(self, x_TD: Tensor) -> Tensor:
        best = self.gate(x_TD).softmax(-1).topk(2, -1)
        out: Tensor = self.experts(x_TD, best.indices, best.values)
        return out


class Sharded(LightningModule):
    """Layers in shards of uneven rows, some of them empty; two of them cut by columns too if there is a dimension for it."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.ModuleDict | None = None
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(0)
        layers = {
            "inp": nn.Linear(FEATURES, WIDTH), "up": nn.Linear(WIDTH, 10), "down": nn.Linear(10, WIDTH),
            "moe": Experts(), "norm": nn.LayerNorm(WIDTH), "head": nn.Linear(WIDTH, 1),
        }  # fmt: skip
        net, mesh = nn.ModuleDict(layers), self.device_mesh
        assert mesh is not None
        if mesh["tensor_parallel"].size() > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(net, mesh["tensor_parallel"], plan)
        for layer in net.values():
            fully_shard(layer, mesh=mesh["data_parallel"])
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.net is not None
        x = self.net["inp"](batch[0])
        x = x + self.net["down"](self.net["up"](x).tanh())
        x = x + self.net["moe"](self.net["norm"](x))
        loss: Tensor = (self.net["head"](x) * self.scale.sum()).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def whole(tensor: Tensor) -> Tensor:
    """All shards together. Collective."""
    return tensor.full_tensor().detach().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()


def trained(
    checkpoint: CheckpointCallback, parallel: tuple[int, int], steps: int, *others: Callback
) -> tuple[dict[str, Tensor], Any]:
    """Train on this rank; return parameters, buffers, and the optimizer's state by name, gathered."""
    os.environ.pop("PL_GLOBAL_SEED", None)
    seed_everything(1, verbose=False)
    data, tensor = parallel
    strategy = ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor)
    module = Sharded()
    trainer = train(module, checkpoint, *others, steps=steps, devices=data * tensor, strategy=strategy)
    state = trainer.optimizers[0].state
    named = dict(module.named_parameters())
    optimizer = {f"{name}/{key}": whole(value) for name, param in named.items() for key, value in state[param].items()}
    return {name: whole(tensor) for name, tensor in [*named.items(), *module.named_buffers()]}, optimizer


@pytest.mark.parametrize(
    ("parallel", "policy", "ranks"),
    [((3, 1), "dense", ([0, 2], [0], [1], [1])), ((2, 2), "sparse", ([0, 1], [0, 1], [2, 3], [2, 3]))],
    ids=["fsdp2", "fsdp2+tp"],
)
def test_shards_are_exported_as_one_model(
    parallel: tuple[int, int], policy: str, ranks: list[list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights and optimizer have the bits of a gather in the run, and none is stored twice, although not all layers are on all dimensions.

    An expert is where its rows are; a rank without rows has counts.
    """
    url, out = str(tmp_path / "run"), tmp_path / "model.safetensors"
    checkpoint = DenseCheckpoint(url, every_n_steps=2) if policy == "dense" else SparseCheckpoint(url, window=2)
    world_size = parallel[0] * parallel[1]
    weights, optimizer = run_world(
        world_size, lambda _: trained(checkpoint, parallel, 3), timeout=timedelta(seconds=90), process_group=False
    )[0]
    assert verify(open_backend(url), everything=True).problems == []
    records = [record for marker in markers_of(url) for record in marker.segments[0].records]
    assert {record.fqn for record in records if record.box} == ({"net.down.weight"} if parallel[1] > 1 else set())
    assert any(record.numel == 0 for record in records)
    assert sum(record.numel for record in records if record.state_key == "param") == sum(
        tensor.numel() for name, tensor in weights.items() if name != "scale"
    )
    assert main(["export", url, str(out), "--optimizer"]) == 0
    assert same(load_file(out), weights)
    assert same(load_file(tmp_path / "model.optimizer.safetensors"), optimizer)
    assert main(["export", url, str(tmp_path / "model.ckpt")]) == 0
    content = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert same(content["state_dict"], weights)
    state = content["optimizer_states"][0]["state"].values()
    names = dict.fromkeys(name.rpartition("/")[0] for name in optimizer)
    found = {f"{name}/{key}": each for name, of in zip(names, state, strict=True) for key, each in of.items()}
    assert same(found, optimizer)
    capsys.readouterr()
    assert main(["inspect", url, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["operator"]: row for row in document["operators"]}
    assert [rows[f"net.moe/expert.{expert}"]["ranks"] for expert in range(EXPERTS)] == list(ranks)
    assert rows["net.up"]["ranks"] == list(range(world_size))
    assert main(["inspect", url]) == 0
    assert f"\nparameters in shards: {document['policy']['sharding']}\n" in capsys.readouterr().out
