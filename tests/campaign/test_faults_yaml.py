"""`examples/faults.yaml`: faults from a configuration file, run by LightningCLI until a life finishes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import cli
from campaign._faults import lines_of, record_of
from campaign._training import quiet
from campaign._warm import WarmParents
from lightning_moe_ckpt.testing import Attempt, assert_same_end, run_attempts, summarize_faults

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "faults.yaml"
SMALL = {"num_blocks": 1, "model_dim": 16, "num_heads": 2, "num_experts": 4}
STEPS = 40
SHORTER = 5
"""By how much everything comes earlier than in the example."""


def configured(folder: Path, *, broken: bool) -> Path:
    """The example made small, in `folder`; without its callbacks unless it is to break."""
    document = yaml.safe_load(EXAMPLE.read_text())
    injector, checkpoint = document["trainer"]["callbacks"]
    injector["init_args"]["folder"] = str(record_of(folder))
    for fault in injector["init_args"]["faults"]:
        fault["step"] //= SHORTER
        if "steps" in fault:
            fault["steps"] //= SHORTER
    injector["init_args"]["random"]["mtbf"] /= SHORTER
    checkpoint["init_args"]["url"] = str(folder / "checkpoints")
    document["trainer"] |= {
        "callbacks": [injector, checkpoint] if broken else [],
        "max_steps": STEPS,
        "limit_val_batches": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": broken,
        "default_root_dir": str(folder),
    }
    document["model"]["architecture"] = SMALL
    document["data"] = {"context": 8, "batch_size": 4, "train_crops": 4 * STEPS, "val_crops": 4}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def fit_from_file(path: Path, life: Attempt) -> Mapping[str, Any]:
    """What `python examples/cli.py fit --config PATH` does, recorded."""
    quiet()
    sys.argv = ["cli.py"]
    built = cli.main(["--config", str(path)], run=False)
    built.trainer.callbacks += life.callbacks()  # type: ignore[attr-defined]
    built.trainer.fit(built.model, built.datamodule)
    return {}


@pytest.mark.timeout(300)
def test_a_configured_campaign_dies_and_ends_in_the_same_bits(warm: WarmParents, scratch: Path) -> None:
    """Every fault of the example strikes once; the training that breaks itself ends as the one left in peace."""
    folders = [scratch / "yaml" / name for name in ("peace", "broken")]
    for folder in folders:
        folder.mkdir(parents=True)
    peace, broken = (configured(folder, broken=folder.name == "broken") for folder in folders)
    reference = warm.call(run_attempts, partial(fit_from_file, peace), url="", workdir=folders[0])
    lives = warm.call(
        run_attempts, partial(fit_from_file, broken), url="", workdir=folders[1], faults=record_of(folders[1])
    )
    assert_same_end(reference, lives)
    struck = [line["kind"] for line in lines_of(folders[1], "fault") if line["name"].startswith("script")]
    assert struck == ["sigkill", "slow_storage", "storage_errors", "bit_flip", "node_loss"]
    assert len(lines_of(folders[1], "fault")) > len(struck), "and some at random"
    summary = summarize_faults(record_of(folders[1]))
    assert summary.lives == len(lives) >= 3
    assert sum(tally.survived for tally in summary.kinds) == len(lives) - 1
