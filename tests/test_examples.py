"""The examples work: the corpus, the model, the configuration file, and the demo's way of judging."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec

import pytest
import torch
from launcher import WorldFailed, exit_after, run_world
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor

import cli
import demo
import demo_worker
import digits
import pipeline_gpt
from corpus import RandomCrops, TextCrops, load_corpus
from demo_report import RunRecords, compare, draw, figures, recoveries
from lightning_moe_ckpt import MoEStrategy
from lightning_moe_ckpt.callbacks import (
    DenseCheckpoint,
    DifferentialCheckpoint,
    PartialExpertCheckpoint,
    SelectiveExpertCheckpoint,
    SparseCheckpoint,
)
from moe_gpt import Architecture, MoEGPT, Recipe

P = ParamSpec("P")

ROOT = Path(__file__).resolve().parents[1]
TINY = Architecture(num_blocks=1, model_dim=16, num_heads=2, num_experts=4, expert_dim=8, context=8)


def test_corpus_is_the_same_every_time() -> None:
    """Two readings give the same bytes, and no part is empty."""
    first, second = load_corpus(), load_corpus()
    assert first.sha256 == second.sha256
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.validation, second.validation)
    assert min(len(first.train), len(first.validation)) > 100_000


def test_corpus_keeps_a_file_in_one_part() -> None:
    """A file that is in one part is not in the other, so validation text is never trained on."""
    corpus = load_corpus()
    source = Path(json.__file__).read_bytes()
    parts = [bytes(part.numpy()) for part in (corpus.train, corpus.validation)]
    assert sum(source in part for part in parts) == 1


def test_crops_depend_on_seed_and_index_only() -> None:
    """Reading in another order, or after drawing random numbers, gives the same crop; another seed does not."""
    text = torch.arange(200, dtype=torch.uint8)
    crops = RandomCrops(text, length=8, size=50, seed=3)
    forwards = [crops[index] for index in range(50)]
    torch.rand(7)
    backwards = [crops[index] for index in reversed(range(50))][::-1]
    assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(forwards, backwards, strict=True))
    assert all(torch.equal(source[1:], target[:-1]) for source, target in forwards)
    other = RandomCrops(text, length=8, size=50, seed=4)
    assert any(not torch.equal(crops[index][0], other[index][0]) for index in range(50))


def test_crops_refuse_a_text_that_is_too_short() -> None:
    """The error names the argument."""
    with pytest.raises(ValueError, match=r"RandomCrops\(length=8\)"):
        RandomCrops(torch.zeros(8, dtype=torch.uint8), length=8, size=1, seed=0)


def test_initial_weights_depend_on_the_seed_of_the_model_only() -> None:
    """Whatever was drawn before, the same `init_seed` builds the same model and leaves the generator alone."""
    weights = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        model = MoEGPT(TINY, init_seed=5)
        model.configure_model()
        assert torch.equal(before, torch.get_rng_state())
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_attention_is_causal() -> None:
    """A later byte changes nothing before it."""
    model = MoEGPT(TINY)
    model.configure_model()
    model.eval()
    source = torch.randint(256, (1, 8), generator=torch.Generator().manual_seed(0))
    changed = source.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    first, second = model(source), model(changed)
    torch.testing.assert_close(first[:, :5], second[:, :5])
    assert not torch.equal(first[:, 5:], second[:, 5:])


def test_model_learns(tmp_path: Path) -> None:
    """A few steps on one process bring the loss down from the 8 bits per byte of a uniform guess."""
    seed_everything(1, verbose=False)
    data = TextCrops(context=8, batch_size=16, train_crops=480, val_crops=16)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=30,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
    )
    trainer.fit(MoEGPT(TINY, Recipe(total_steps=30, warmup_steps=3)), data)
    assert float(trainer.callback_metrics["val/bits_per_byte"]) < 6.5


@pytest.fixture
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns if the arguments of the running process, pytest's here, could be meant instead."""
    monkeypatch.setattr(sys, "argv", ["cli.py"])


def lightning_cli(test: Callable[P, None]) -> Callable[P, None]:
    """Mark a test that runs LightningCLI, which calls what jsonargparse has deprecated."""
    return pytest.mark.usefixtures("_no_arguments")(pytest.mark.filterwarnings("ignore::DeprecationWarning")(test))


@lightning_cli
def test_configuration_file_builds_strategy_and_callback() -> None:
    """LightningCLI reads examples/text.yaml and passes its values on."""
    built = cli.main(["--config", str(ROOT / "examples" / "text.yaml")], run=False)
    assert isinstance(built.trainer.strategy, MoEStrategy)
    assert built.trainer.strategy.expert_parallel == 3
    (checkpoint,) = (c for c in built.trainer.callbacks if isinstance(c, SparseCheckpoint))  # type: ignore[attr-defined]
    assert (checkpoint.url, checkpoint.window, checkpoint.keep) == ("out/text/checkpoints", 6, 2)
    assert built.model.recipe.total_steps == built.trainer.max_steps == 2000
    assert built.model.architecture.num_experts == 12


@lightning_cli
def test_strategy_has_a_short_name() -> None:
    """`strategy: moe` is enough where experts are not sharded."""
    built = cli.main(["--trainer.strategy=moe", "--trainer.accelerator=cpu", "--trainer.devices=1"], run=False)
    assert isinstance(built.trainer.strategy, MoEStrategy)
    assert built.trainer.strategy.expert_parallel == 1


def _train(out: Path, *options: str, kill_after: int | None = None) -> demo.Kill | None:
    """Run the demo's worker on one rank, in a forked process; killed once a window past a step is committed."""
    arguments = ["--out", str(out), "--steps", "14", "--blocks", "1", "--crops", "80", *options]
    child, tail = _forked(lambda: demo_worker.main(arguments)), demo.Tail(out, 1)
    for _ in _until_ended(child):
        tail.poll()
        if kill_after is not None and tail.steps[0] >= kill_after and demo.committed_window(out / "checkpoints"):
            kill = demo.kill_one("torchrun", tail)
            os.waitpid(child, 0)
            return kill
    assert (out / "end.rank0.pt").exists(), "the attempt failed: see its traceback in the captured output"
    return None


def _until_ended(child: int) -> Iterator[None]:
    deadline = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        assert time.monotonic() < deadline
        yield
        time.sleep(0.01)


def _forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        exit_after(work)
    return child


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRecords, RunRecords, demo.Kill]:
    """A run in peace, and one that was killed and resumed."""
    clean, killed = tmp_path_factory.mktemp("clean"), tmp_path_factory.mktemp("killed")
    options = ["--checkpoints", (killed / "checkpoints").as_uri(), "--window", "3"]
    _train(clean)
    kill = _train(killed, *options, kill_after=6)
    assert kill is not None
    _train(killed, *options)
    return RunRecords(clean), RunRecords(killed), kill


def test_demo_finds_identical_runs_identical(runs: tuple[RunRecords, RunRecords, demo.Kill]) -> None:
    """A worker killed by SIGKILL and started again ends in the bits of the worker left in peace."""
    clean, killed, _ = runs
    verdict = compare(clean, killed)
    assert verdict.lines == []
    assert verdict.identical
    assert killed.lines("report")[-1]["resumed_from"] > 0


def test_demo_shows_what_happened(runs: tuple[RunRecords, RunRecords, demo.Kill], tmp_path: Path) -> None:
    """A row for each kill, the claim as a row of its own, and a picture."""
    clean, killed, kill = runs
    found = killed.recovery(kill.time)
    assert kill.step <= found.lost < 14
    assert max(found.replayed) == found.lost
    assert 0 < found.begin_seconds < found.seconds
    assert found.stayed == 0
    (row,) = zip(*(column.cells for column in recoveries(killed, [kill]).columns), strict=True)
    assert row[:2] == ("torchrun", str(found.lost + 1))
    assert "bit-identical: yes" in list(figures(clean, killed, compare(clean, killed)).columns[0].cells)
    draw(clean, killed, [kill], tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def _flip_weight(state: dict[str, Any]) -> None:
    bits = state["param/head.weight"].view(torch.uint8)
    bits[0, 0] ^= 1


def _flip_random(state: dict[str, Any]) -> None:
    state["rng/torch"][100] ^= 1


def _forget_moment(state: dict[str, Any]) -> None:
    del state["optimizer/0/state/head.weight/exp_avg"]


@pytest.mark.parametrize("change", [_flip_weight, _flip_random, _forget_moment])
def test_demo_sees_another_end(
    runs: tuple[RunRecords, RunRecords, demo.Kill],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[dict[str, Any]], None],
) -> None:
    """One bit of a weight or of the random state, or a missing tensor, turns the verdict."""
    clean, killed, _ = runs
    state = killed.end_state(0)
    change(state)
    monkeypatch.setattr(killed, "end_state", lambda _: state)
    verdict = compare(clean, killed)
    assert not verdict.identical
    assert "bit-identical: no" in list(figures(clean, killed, verdict).columns[0].cells)


def test_demo_sees_another_loss(runs: tuple[RunRecords, RunRecords, demo.Kill]) -> None:
    """A replayed step whose loss differs in its last bit turns the verdict, even if the end is the same."""
    clean, killed, _ = runs
    changed = RunRecords(killed.out)
    line = next(line for line in reversed(changed.ranks[0]) if line["event"] == "step")
    line["loss"] = (float.fromhex(line["loss"]) * (1 + 2**-23)).hex()
    assert not compare(clean, changed).identical


@lightning_cli
def test_digits_are_learned_from_the_configuration_file(tmp_path: Path) -> None:
    """Three epochs recognise far more than chance, every image is in one part, and a checkpoint is there."""
    options = [
        *("--config", str(ROOT / "examples" / "digits.yaml"), "--trainer.max_steps=66"),
        *("--trainer.callbacks.init_args.url", str(tmp_path), "--trainer.logger=false"),
        *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
        *("--trainer.default_root_dir", str(tmp_path)),  # where the configuration is saved, with no logger
    ]

    def work(rank: int) -> tuple[int, float, int]:
        built = digits.main(options, run=False)
        built.trainer.fit(built.model, built.datamodule)
        (checkpoint,) = (c for c in built.trainer.callbacks if isinstance(c, SparseCheckpoint))  # type: ignore[attr-defined]
        num_images = len(built.datamodule.train) + len(built.datamodule.validation)
        accuracy = float(built.trainer.callback_metrics["val/accuracy"])
        return num_images, accuracy, checkpoint.report.generations["storage"]

    ((num_images, accuracy, stored),) = run_world(1, work, timeout=timedelta(seconds=120), process_group=False)
    assert (num_images, stored) == (1797, 66)
    assert accuracy > 0.6


@lightning_cli
def test_two_stages_learn_from_the_configuration_file_and_go_on_where_they_were(tmp_path: Path) -> None:
    """Some steps bring the loss below that of a uniform guess on both processes, a second start finds the run finished."""
    options = [
        *("--config", str(ROOT / "examples" / "pipeline.yaml"), "--trainer.max_steps=30", "--data.val_crops=32"),
        *(
            "--trainer.callbacks.init_args.url",
            str(tmp_path),
            "--trainer.logger=false",
            "--model.architecture.context=16",
        ),
        *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--data.context=16"),
        *("--model.architecture.model_dim=32", "--trainer.default_root_dir", str(tmp_path)),
        *("--trainer.val_check_interval=10", "--model.architecture.expert_dim=32", "--data.train_crops=480"),
    ]

    def work(rank: int) -> tuple[float, float, int, list[str]]:
        built = pipeline_gpt.main(options, run=False)
        built.trainer.fit(built.model, built.datamodule)
        (checkpoint,) = (c for c in built.trainer.callbacks if isinstance(c, SparseCheckpoint))  # type: ignore[attr-defined]
        seen = built.trainer.callback_metrics
        blocks = sorted({name.split(".")[2] for name, _ in built.model.named_parameters() if ".blocks." in name})
        return float(seen["train/loss"]), float(seen["val/bits_per_byte"]), checkpoint.report.steps, blocks

    first = run_world(2, work, timeout=timedelta(seconds=120), process_group=False)
    assert [row[2:] for row in first] == [(30, ["0", "1"]), (30, ["2", "3"])]
    assert first[0][:2] == first[1][:2]
    assert first[0][0] < math.log(256) - 0.5
    assert first[0][1] < 8
    again = run_world(2, lambda rank: work(rank)[2], timeout=timedelta(seconds=120), process_group=False)
    assert again == [0, 0]


def test_a_mixtral_in_shards_is_killed_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    """One of three ranks gets a SIGKILL. When all have started again, every shard of each rank is that of a run left in peace."""
    example = importlib.import_module("fsdp_mixtral")  # with transformers, once for all ranks
    train = example.Mixtral.training_step

    def work(rank: int, name: str, kill: int = -1) -> tuple[int, dict[str, Tensor]]:
        steps = []

        def step(self: Any, batch: Any, batch_idx: int) -> Any:
            steps.append(self.global_step)
            if rank == 1 and self.global_step == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            return train(self, batch, batch_idx)

        example.Mixtral.training_step = step
        module = example.main(["--steps", "14", "--url", str(tmp_path / name)])
        return steps[0], {name: param.to_local().detach() for name, param in module.named_parameters()}

    start = partial(run_world, 3, timeout=timedelta(seconds=60), process_group=False)
    calm = start(lambda rank: work(rank, "calm"))
    with pytest.raises(WorldFailed):
        start(lambda rank: work(rank, "killed", kill=11))
    resumed = start(lambda rank: work(rank, "killed"))
    assert [first > 0 for first, _ in [*calm, *resumed]] == [False] * 3 + [True] * 3
    assert sum(shard.numel() for _, shards in calm for shard in shards.values()) == 451_904
    for (_, before), (_, after) in zip(calm, resumed, strict=True):
        assert all(torch.equal(before[name].view(torch.int32), after[name].view(torch.int32)) for name in before)


@lightning_cli
def test_a_mixtral_whose_experts_are_spread_is_killed_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Each of three ranks loads 4 of 12 experts from a folder. One gets a SIGKILL; when all have started again, all ends are those
    of a run left in peace."""
    example = importlib.import_module("mixtral_ep")  # with transformers, once for all ranks
    configure, train = example.Mixtral.configure_model, example.Mixtral.training_step
    drawn = example.Mixtral()
    drawn.configure_model()
    drawn.model.save_pretrained(tmp_path / "model")
    options = [
        *("--config", str(ROOT / "examples" / "mixtral_ep.yaml"), "--trainer.max_steps=14", "--trainer.logger=false"),
        *("--model.path", str(tmp_path / "model"), "--data.train_crops=480", "--data.context=16"),
        *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
        *("--trainer.default_root_dir", str(tmp_path)),
    ]

    def work(rank: int, name: str, kill: int = -1) -> tuple[int, set[int], dict[str, Tensor]]:
        steps: list[int] = []
        held: set[int] = set()

        def make(self: Any) -> None:
            configure(self)
            held.update(len(each) for name, each in self.named_parameters() if ".experts." in name)

        def step(self: Any, batch: Any, batch_idx: int) -> Any:
            steps.append(self.global_step)
            if rank == 1 and self.global_step == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            return train(self, batch, batch_idx)

        example.Mixtral.configure_model, example.Mixtral.training_step = make, step
        built = example.main([*options, f"--trainer.callbacks.init_args.url={tmp_path / name}"], run=False)
        built.trainer.fit(built.model, built.datamodule)
        return steps[0], held, {name: each.detach() for name, each in built.model.named_parameters()}

    start = partial(run_world, 3, timeout=timedelta(seconds=60), process_group=False)
    calm = start(lambda rank: work(rank, "calm"))
    with pytest.raises(WorldFailed):
        start(lambda rank: work(rank, "killed", kill=11))
    resumed = start(lambda rank: work(rank, "killed"))
    assert [first > 0 for first, _, _ in [*calm, *resumed]] == [False] * 3 + [True] * 3
    assert all(held == {4} for _, held, _ in [*calm, *resumed])
    for (_, _, before), (_, _, after) in zip(calm, resumed, strict=True):
        assert all(torch.equal(before[name].view(torch.int32), after[name].view(torch.int32)) for name in before)


@lightning_cli
@pytest.mark.parametrize(("example", "main"), [("text", cli.main), ("digits", digits.main)])
def test_each_example_runs_with_each_policy(example: str, main: Callable[..., Any]) -> None:
    """A policy's file, laid over the example's, puts its callback in the place of the example's own."""
    found = {}
    for path in sorted((ROOT / "examples" / "policies").glob("*.yaml")):
        built = main(["--config", str(ROOT / "examples" / f"{example}.yaml"), "--config", str(path)], run=False)
        own = [type(c) for c in built.trainer.callbacks if type(c).__module__.startswith("lightning_moe_ckpt")]
        found[path.stem] = own
    assert found == {
        "dense": [DenseCheckpoint],
        "differential": [DifferentialCheckpoint],
        "partial": [PartialExpertCheckpoint],
        "selective": [SelectiveExpertCheckpoint],
        "sparse": [SparseCheckpoint],
    }
