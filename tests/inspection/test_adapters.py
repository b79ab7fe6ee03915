"""`moe-ckpt export URL FOLDER` of a model with adapters of PEFT: what PEFT and transformers load is, bit for bit, what was trained."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor

from inspection._runs import train
from inspection.test_hugging_face import CONFIG, same, state_of
from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.cli import main

peft: Any = pytest.importorskip("peft", reason="PEFT has no release for this version of Python")
ATTENTION = {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 6, "rank_pattern": {"v_proj": 3}}
EXPERTS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "modules_to_save": ["lm_head"],
}


def base(dtype: torch.dtype = torch.float32) -> Any:
    seed_everything(5, verbose=False)
    config = {
        **CONFIG,
        "hidden_size": 16,
        "intermediate_size": 16,
        "tie_word_embeddings": False,
    }  # torch asks it of bfloat16
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**config)).to(dtype)


class LitAdapters(LightningModule):
    """Adapters on a base that does not train."""

    def __init__(self, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model: Any = peft.get_peft_model(base(dtype), peft.LoraConfig(r=2, init_lora_weights=False, **options))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens = (batch[0].abs() * 15).long()
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), 1e-2)


@pytest.fixture(params=["attention", "experts", "bfloat16"])
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any]:
    """The URL of a short training, and the model at its end."""
    kinds: dict[str, dict[str, Any]] = {"attention": ATTENTION, "experts": EXPERTS}
    options = kinds.get(request.param, {**ATTENTION, "dtype": torch.bfloat16})
    module, url = LitAdapters(**options), str(tmp_path / "run")
    train(module, DenseCheckpoint(url), steps=2)
    return url, module.model


def test_peft_loads_an_exported_adapter(trained: tuple[str, Any], tmp_path: Path) -> None:
    """On the base that it was trained on."""
    url, model = trained
    assert main(["export", url, str(tmp_path / "adapter")]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = peft.PeftModel.from_pretrained(base(model.dtype), tmp_path / "adapter")
        wanted, found = (peft.get_peft_model_state_dict(each) for each in (model, loaded))
    assert list(wanted) == list(found)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert same(state_of(model), state_of(loaded))


def test_transformers_loads_an_exported_sum(trained: tuple[str, Any], tmp_path: Path) -> None:
    """It is what PEFT makes of base and adapter itself."""
    url, model = trained
    assert main(["export", url, str(tmp_path / "whole"), "--merge"]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", output_loading_info=True)
        wanted = state_of(model.merge_and_unload())
    assert not any(report.values()), report
    assert same(wanted, state_of(loaded))


def test_what_is_no_sum_is_refused_by_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """PEFT adds weights up otherwise under DoRA; the adapter alone is exported all the same."""
    url = str(tmp_path / "run")
    train(LitAdapters(target_modules=["q_proj"], use_dora=True), DenseCheckpoint(url), steps=1)
    assert main(["export", url, str(tmp_path / "whole"), "--merge"]) != 0
    assert "q_proj cannot be added to weights of the base here" in capfd.readouterr().err
    assert main(["export", url, str(tmp_path / "adapter")]) == 0
