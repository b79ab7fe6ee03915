"""Hugging Face models hold one rank's experts while they are loaded or drawn: the bits of the whole model, without its memory."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from launcher import run_world
from operators._families import COMMON, SPREAD, balanced
from torch import Tensor, nn

from lightning_moe_ckpt.moe import spread_experts
from lightning_moe_ckpt.moe._spread import spread_while_loading
from lightning_moe_ckpt.parallel import ParallelGroups, set_current_groups

E = 12
PLACES = [(0, 1), (1, 3), (0, 3), (2, 3), (0, 4), (3, 4)]


@pytest.fixture(autouse=True)
def _one_rank_afterwards() -> Iterator[None]:
    yield
    set_current_groups(None)


def drawn(name: str, **more: Any) -> Any:
    torch.manual_seed(3)
    return balanced(name, E, **more)


def spread(make: Callable[[], Any], rank: int, ep_size: int) -> Any:
    """What a rank makes; it needs no other rank for that."""
    set_current_groups(ParallelGroups.placed(rank, ep_size, ep_size=ep_size))
    with torch.device("cpu"), spread_while_loading():
        model = make()
    left = spread_experts(model)
    set_current_groups(None)
    assert left == [], "a layer was left whole"
    return model


def states(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def assert_rows(found: nn.Module, whole: nn.Module, rank: int, ep_size: int) -> None:
    """All states are those of the whole model by bits, experts its rows and no views of more."""
    own, wanted, rows = states(found), states(whole), range(E)[rank * E // ep_size : (rank + 1) * E // ep_size]
    assert own.keys() == wanted.keys()
    cut = [name for name in own if own[name].shape != wanted[name].shape]
    assert sorted(cut) == sorted(name for name in own if ".experts." in name and ep_size > 1)
    for name, tensor in own.items():
        expected = wanted[name][rows.start : rows.stop] if name in cut else wanted[name]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)
        assert name not in cut or tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("name", SPREAD.values())
def test_families_load_their_rows(tmp_path: Path, name: str) -> None:
    """From many files, in the precision of the files and in another: each rank has its rows, and all else like the others."""
    tied = {"tie_word_embeddings": True} if name == "qwen3_moe" else {}
    model = drawn(name, **tied)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for dtype in (None, torch.bfloat16):
        load = partial(type(model).from_pretrained, tmp_path, dtype=dtype)
        whole = load()
        assert dtype or all(torch.equal(tensor, states(model)[key]) for key, tensor in states(whole).items())
        for rank, ep_size in PLACES if dtype is None else PLACES[1:2]:
            assert_rows(spread(load, rank, ep_size), whole, rank, ep_size)


@pytest.mark.parametrize("name", SPREAD.values())
def test_drawn_experts_are_rows_of_the_whole_model(name: str) -> None:
    """A rank draws what a single process draws, and then draws on as this does."""
    whole = drawn(name)
    after = torch.rand(3)
    for rank, ep_size in PLACES[1:5:3]:
        found = spread(partial(drawn, name), rank, ep_size)
        assert torch.equal(torch.rand(3), after)
        assert_rows(found, whole, rank, ep_size)


def test_files_with_names_of_the_model_in_memory_load_their_rows(tmp_path: Path) -> None:
    """`moe-ckpt export` writes stacked experts, as files of torch may have them too."""
    model = drawn("mixtral")
    for folder, save in (("a", safetensors.torch.save_file), ("b", torch.save)):
        out = tmp_path / folder
        out.mkdir()
        out.joinpath("config.json").write_text(json.dumps(model.config.to_dict()))
        name = {"a": "model.safetensors", "b": "pytorch_model.bin"}[folder]
        save({key: tensor.clone() for key, tensor in model.state_dict().items()}, out / name)
        load = partial(transformers.AutoModelForCausalLM.from_pretrained, out)
        assert_rows(spread(load, 2, 3), model, 2, 3)


def test_a_layer_that_the_files_lack_is_drawn_as_by_one_process(tmp_path: Path) -> None:
    """The other layers are read as ever; this one's stacks are drawn whole, then cut."""
    model = drawn("mixtral")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    entries = safetensors.torch.load_file(file)
    kept = {key: entry for key, entry in entries.items() if "layers.1.block_sparse_moe.experts" not in key}
    assert len(kept) < len(entries)
    safetensors.torch.save_file(kept, file, {"format": "pt"})

    def load() -> Any:
        torch.manual_seed(8)
        return type(model).from_pretrained(tmp_path)

    whole = load()
    assert not torch.equal(whole.model.layers[1].mlp.experts.down_proj, model.model.layers[1].mlp.experts.down_proj)
    assert_rows(spread(load, 1, 3), whole, 1, 3)


def test_files_with_other_experts_are_refused_as_by_one_process(tmp_path: Path) -> None:
    """The rows of 24 experts that 12 need are not taken for these."""
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**COMMON, num_local_experts=2 * E))
    model.save_pretrained(tmp_path)
    model.config.num_local_experts = E
    with pytest.raises(RuntimeError, match="mismatched"):
        spread(partial(type(model).from_pretrained, tmp_path, config=model.config), 1, 3)


def test_nothing_changes_outside_of_the_context(tmp_path: Path) -> None:
    """When a strategy has built its model, transformers is as it was."""
    before = {**vars(transformers.modeling_utils)}, {**vars(transformers.PreTrainedModel)}
    spread(partial(drawn, "olmoe"), 0, 3)
    assert before == ({**vars(transformers.modeling_utils)}, {**vars(transformers.PreTrainedModel)})


SIZES = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 512, "num_hidden_layers": 4}
MIB = 2**20


@dataclass
class Peak:
    """Bytes by which a process grew at most while it made a model, and bytes of the model's parameters."""

    grown: int
    """Without pages of files, which the system may drop; looked at every millisecond."""
    experts: int
    rest: int


def resident() -> int:
    (line,) = (row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def peak(make: Callable[[], Any]) -> Peak:
    # What is freed shall go back to the system, as with stacks of a real size, however much of the heap other tests have left free.
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, MIB)  # M_MMAP_THRESHOLD
    for _ in range(64):
        libc.malloc(8 * MIB)
    seen, done = [resident()], threading.Event()

    def look() -> None:
        while not done.wait(0.001):
            seen.append(resident())

    watching = threading.Thread(target=look)
    watching.start()
    model = make()
    done.set()
    watching.join()
    sizes = {name: each.numel() * each.element_size() for name, each in model.named_parameters()}
    experts = sum(nbytes for name, nbytes in sizes.items() if ".experts." in name)
    return Peak(max(*seen, resident()) - seen[0], experts, sum(sizes.values()) - experts)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_no_rank_ever_holds_all_experts_of_files(tmp_path: Path, name: str) -> None:
    """A rank grows by its own experts, once as read and once as put together, which is its share of what one process needs."""
    config = type(drawn(name).config)(**{**COMMON, **SIZES}, num_local_experts=E)
    cls = type(drawn(name))
    with torch.device("meta"):
        model = cls(config)
    model.to_empty(device="cpu").save_pretrained(tmp_path, max_shard_size="40MB")
    del model
    load = partial(cls.from_pretrained, tmp_path, dtype=torch.bfloat16)
    (whole,) = run_world(1, lambda _: peak(load), process_group=False)
    print(f"{name}, one process: {whole}")
    for found in run_world(2, lambda rank: peak(partial(spread, load, 3 * rank, 4)), process_group=False):
        print(f"{name}, one of four: {found}")
        assert 4 * found.experts == whole.experts
        assert found.grown < 2 * found.experts + found.rest + 10 * MIB < whole.experts
        assert found.grown < whole.grown  # of which free pages of the heap may hide some


def test_no_rank_ever_holds_all_experts_when_they_are_drawn() -> None:
    """A rank grows by its own experts, and by one whole layer."""
    config = transformers.MixtralConfig(**{**COMMON, **SIZES}, num_local_experts=E)
    build = partial(transformers.MixtralForCausalLM, config)
    (whole,) = run_world(1, lambda _: peak(build), process_group=False)
    (found,) = run_world(1, lambda _: peak(partial(spread, build, 3, 4)), process_group=False)
    print(f"one process: {whole}, one of four: {found}")
    assert 4 * found.experts == whole.experts
    assert found.grown < found.experts + whole.experts / 4 + found.rest + 8 * MIB < whole.experts
    assert found.grown < whole.grown
