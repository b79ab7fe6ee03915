"""`moe-ckpt export URL FOLDER`: what transformers loads is, bit for bit, what was trained."""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from launcher import run_world
from lightning.pytorch import LightningModule, seed_everything
from safetensors import safe_open
from torch import Tensor, nn

from inspection._runs import FEATURES, train
from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.storage import RunView, open_backend
from lightning_moe_ckpt.strategy import MoEStrategy

CONFIG: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 8,
    "pad_token_id": 0,
    "use_cache": False,
}


class LitMixtral(LightningModule):
    """A Hugging Face model beside a layer of the user's own."""

    def __init__(self, *, tied: bool = True, by_hand: bool = False, teacher: bool = False, lr: float = 1e-2) -> None:
        super().__init__()
        self.lr = lr
        config = transformers.MixtralConfig(**CONFIG, tie_word_embeddings=tied)
        self.model: Any = transformers.MixtralForCausalLM(config)
        if by_hand:  # the class does not know
            self.model.lm_head.weight = self.model.model.embed_tokens.weight
        self.probe = nn.Linear(FEATURES, 1)
        if teacher:
            self.teacher = transformers.MixtralForCausalLM(transformers.MixtralConfig(**CONFIG))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens = (batch[0].abs() * 15).long()
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss + self.probe(batch[0]).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for n, p in self.named_parameters() if not n.startswith("teacher")), self.lr)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def trained(url: str, **options: Any) -> dict[str, Tensor]:
    """Train a little and return the `state_dict` of the Hugging Face model at the end."""
    seed_everything(3, verbose=False)
    module = LitMixtral(**options)
    train(module, DenseCheckpoint(url), steps=2)
    return state_of(module.model)


def loaded(folder: Path) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, report = found
    assert type(model) is transformers.MixtralForCausalLM
    assert not any(report.values()), report
    return state_of(model)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return list(left) == list(right) and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def names_in(folder: Path) -> list[str]:
    found: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found += file.keys()
    return found


@pytest.fixture(scope="module")
def tied_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Tensor]]:
    """Three ranks, each of which wrote a part of every tensor."""
    url = str(tmp_path_factory.mktemp("hf") / "run")
    return url, ranks_of(url, 1)[0]


def ranks_of(url: str, ep_size: int, lr: float = 1e-2) -> list[dict[str, Tensor]]:
    """Train on three ranks and return each rank's `state_dict`."""

    def work(rank: int) -> dict[str, Tensor]:
        os.environ.pop("PL_GLOBAL_SEED", None)
        seed_everything(3, verbose=False)
        module = LitMixtral(lr=lr)
        train(module, DenseCheckpoint(url), steps=2, devices=3, strategy=MoEStrategy(expert_parallel=ep_size))
        return state_of(module.model)

    return run_world(3, work, timeout=timedelta(seconds=120), process_group=False)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_experts_spread_over_ranks_are_whole_in_the_folder(tmp_path: Path) -> None:
    """All experts of all ranks in order, and where nothing moves, each file has the bytes of an export of the whole model."""
    ranks = ranks_of(str(tmp_path / "spread"), 3, lr=0.0)
    assert main(["export", str(tmp_path / "spread"), str(tmp_path / "hf")]) == 0
    whole = {
        name: torch.cat([rank[name] for rank in ranks]) if ".experts." in name else value
        for name, value in ranks[0].items()
    }
    assert same(loaded(tmp_path / "hf"), whole)
    ranks_of(str(tmp_path / "whole"), 1, lr=0.0)
    assert main(["export", str(tmp_path / "whole"), str(tmp_path / "hf of whole")]) == 0
    assert files_in(tmp_path / "hf") == files_in(tmp_path / "hf of whole")


def test_transformers_loads_what_was_trained(tied_run: tuple[str, dict[str, Tensor]], tmp_path: Path) -> None:
    """Without prefix, without the second name of the tied weight, and with both configurations."""
    url, expected = tied_run
    assert main(["export", url, str(tmp_path / "hf")]) == 0
    assert same(loaded(tmp_path / "hf"), expected)
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert "lm_head.weight" not in names_in(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["MixtralForCausalLM"], "float32")
    transformers.GenerationConfig.from_pretrained(tmp_path / "hf")


def test_the_names_are_those_of_save_pretrained_for_a_dense_model(tmp_path: Path) -> None:
    """Where memory and files have the same names, the files agree, tied weights included."""
    seed_everything(3, verbose=False)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **{key: value for key, value in CONFIG.items() if "expert" not in key}, tie_word_embeddings=True
        )
    )

    class Lit(LitMixtral):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama

    train(Lit(), DenseCheckpoint(str(tmp_path / "run")), steps=1)
    llama.save_pretrained(tmp_path / "theirs")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "ours")]) == 0
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs")
    ours, theirs = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("ours", "theirs"))
    assert ours == theirs


def test_large_weights_become_several_files_with_an_index(
    tied_run: tuple[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    """As `from_pretrained` wants them; every name is in the file that the index says."""
    url, expected = tied_run
    assert main(["export", url, str(tmp_path / "hf"), "--max-shard-size", "1kb"]) == 0
    assert same(loaded(tmp_path / "hf"), expected)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 3
    assert sorted(set(index["weight_map"].values())) == files
    for file in files:
        with safe_open(tmp_path / "hf" / file, "pt") as opened:
            assert sorted(opened.keys()) == sorted(name for name, at in index["weight_map"].items() if at == file)
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for name, tensor in expected.items() if name != "lm_head.weight"
    )


def test_a_second_export_leaves_no_stale_weights(tied_run: tuple[str, dict[str, Tensor]], tmp_path: Path) -> None:
    """`--force` replaces weights and configuration, and leaves a tokenizer that lies there."""
    url, expected = tied_run
    out = tmp_path / "hf"
    assert main(["export", url, str(out), "--max-shard-size", "1000"]) == 0
    (out / "tokenizer.json").write_text("{}")
    assert main(["export", url, str(out)]) == 2
    assert main(["export", url, str(out), "--force"]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    (out / "tokenizer.json").unlink()
    assert same(loaded(out), expected)


def test_weights_tied_by_hand_are_written_twice(tmp_path: Path) -> None:
    """The class would not find the second one: left out, it would be initialised anew."""
    expected = trained(str(tmp_path / "run"), tied=False, by_hand=True)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    assert "lm_head.weight" in names_in(tmp_path / "hf")
    assert same(loaded(tmp_path / "hf"), expected)


def test_of_several_models_one_must_be_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The message lists them."""
    expected = trained(str(tmp_path / "run"), teacher=True)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 2
    err = capsys.readouterr().err
    assert "'model' (MixtralForCausalLM), 'teacher' (MixtralForCausalLM)" in err
    assert "--module" in err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hf"), "--module", "model"]) == 0
    assert same(loaded(tmp_path / "hf"), expected)


def test_a_module_without_one_is_refused(
    capsys: pytest.CaptureFixture[str], dense_run: tuple[str, Any], tmp_path: Path
) -> None:
    """With what it can be exported to, and no folder is left."""
    assert main(["export", dense_run[0], str(tmp_path / "hf")]) == 2
    err = capsys.readouterr().err
    assert "`Small` holds no Hugging Face model" in err
    assert ".safetensors or .ckpt" in err
    assert list(tmp_path.iterdir()) == []


def test_only_models_on_the_outside_are_described(tied_run: tuple[str, dict[str, Tensor]]) -> None:
    """Not the backbone inside `MixtralForCausalLM`, nor its layers, all of which keep the configuration."""
    view = RunView.open(open_backend(tied_run[0]))
    commit = view.generations()[0].commit
    assert commit is not None
    line, other, _ = (view.read_marker(commit, rank).module for rank in range(3))
    assert line is not None
    assert other is None
    first = line.read()
    assert [(each.prefix, each.class_name, each.tied) for each in first.hugging_face] == [
        ("model", "MixtralForCausalLM", ("lm_head.weight",))
    ]
    assert first.aliases == {"model.lm_head.weight": "model.model.embed_tokens.weight"}
    assert all("inv_freq" in name for name in first.unsaved)


def test_exporting_needs_no_transformers(
    tied_run: tuple[str, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it cannot be imported, every format is written."""
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers", None)
        for name in ("hf", "m.ckpt", "m.safetensors"):
            assert main(["export", tied_run[0], str(tmp_path / name)]) == 0
    assert same(loaded(tmp_path / "hf"), tied_run[1])


def test_types_are_kept(tmp_path: Path) -> None:
    """A model trained in bf16 is loaded in bf16."""
    seed_everything(3, verbose=False)
    module = LitMixtral()
    module.model.set_experts_implementation("eager")
    train(module, DenseCheckpoint(str(tmp_path / "run")), steps=2, precision="bf16-true")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    assert same(loaded(tmp_path / "hf"), state_of(module.model))
    assert {tensor.dtype for tensor in state_of(module.model).values()} == {torch.bfloat16}
