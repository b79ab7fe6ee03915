"""LightningCLI: every argument from YAML, its help, and `resume` as a configuration file has it."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import re
import sys
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest
import yaml  # type: ignore[import-untyped]
from launcher import run_world
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import cli
from lightning_moe_ckpt import MoEStrategy
from lightning_moe_ckpt.callbacks import (
    CheckpointArguments,
    DenseCheckpoint,
    DifferentialCheckpoint,
    ExpertLoadMonitor,
    PartialExpertCheckpoint,
    Popularity,
    Retention,
    SelectiveExpertCheckpoint,
    SparseCheckpoint,
)
from lightning_moe_ckpt.cli import main as moe_ckpt
from lightning_moe_ckpt.errors import ConfigurationError, NoUsableGeneration
from lightning_moe_ckpt.fit import _cli
from lightning_moe_ckpt.policies import DensePolicy
from lightning_moe_ckpt.testing import FaultInjector

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# jsonargparse has deprecated what LightningCLI calls; the rest is Lightning's advice about tiny runs.
pytestmark = pytest.mark.filterwarnings("ignore")

FROM_THE_TRAINER = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns if the arguments of the running process, pytest's here, could be meant instead."""
    monkeypatch.setattr(sys, "argv", ["cli.py"])


def example(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((EXAMPLES / name).read_text()))


def entries(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Callbacks of a file, and its strategy where that is written out."""
    trainer = document["trainer"]
    strategy = trainer["strategy"]
    return [*trainer["callbacks"], *([strategy] if isinstance(strategy, dict) else [])]


def callback(built: LightningCLI, kind: type[Callback]) -> Any:
    (found,) = (each for each in built.trainer.callbacks if isinstance(each, kind))  # type: ignore[attr-defined]
    return found


def arguments(kind: type) -> set[str]:
    return set(inspect.signature(kind).parameters)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (SparseCheckpoint, "sparse.yaml"),
        (DenseCheckpoint, "dense.yaml"),
        (ExpertLoadMonitor, "sparse.yaml"),
        (FaultInjector, "faults.yaml"),
        (MoEStrategy, "sparse.yaml"),
    ],
)
def test_an_example_names_every_argument(kind: type, name: str) -> None:
    """An argument that is added is added there; what the Trainer gives is left to it."""
    (entry,) = (each for each in entries(example(name)) if each["class_path"].endswith("." + kind.__name__))
    assert set(entry["init_args"]) == arguments(kind) - FROM_THE_TRAINER


def test_values_of_a_file_arrive_as_their_types() -> None:
    """Objects, durations, dicts and choices."""
    options = ["--trainer.callbacks.init_args.every_n_steps=7", "--trainer.strategy.init_args.timeout=0:10:00"]
    built = cli.main(["--config", str(EXAMPLES / "sparse.yaml"), *options], run=False)
    sparse, strategy = callback(built, SparseCheckpoint), built.trainer.strategy
    assert sparse.popularity == Popularity(counts="soft", half_life_steps=50.0)
    assert sparse.stop_grace == timedelta(seconds=25)
    assert (sparse.overhead_target, sparse.storage_at_least) == (0.03, timedelta(minutes=10))
    assert sparse.retention == Retention(last=2, every_n_steps=100)
    assert (sparse.storage_options, sparse.keep, sparse.resume, sparse.batches) == ({}, 2, "auto", "reposition")
    assert callback(built, ExpertLoadMonitor).every_n_steps == 7
    assert isinstance(strategy, MoEStrategy)
    assert (strategy.timeout, strategy.process_group_backend) == (timedelta(minutes=10), "gloo")


@pytest.mark.parametrize(("value", "bound"), [("100", "every_n_steps=100"), ("null", "")])
def test_the_users_number_is_told_from_an_equal_default(value: str, bound: str) -> None:
    """`null`, or a file without it, is the default, which cost may stretch."""
    options = ["--config", str(EXAMPLES / "dense.yaml"), f"--trainer.callbacks.init_args.every_n_steps={value}"]
    policy = callback(cli.main(options, run=False), DenseCheckpoint)._policy()
    assert isinstance(policy, DensePolicy)
    assert (policy.period, policy.bound) == (100, bound)


@pytest.mark.parametrize("kind", [DifferentialCheckpoint, PartialExpertCheckpoint, SelectiveExpertCheckpoint])
def test_a_policy_file_names_what_the_policy_adds(kind: type) -> None:
    """All arguments of its own; those that every checkpoint callback takes are in `sparse.yaml` and `dense.yaml`."""
    own = arguments(kind) - CheckpointArguments.__annotations__.keys()
    name = kind.__name__.removesuffix("Checkpoint").removesuffix("Expert").lower()
    (entry,) = example(f"policies/{name}.yaml")["trainer"]["callbacks"]
    assert set(entry["init_args"]) == own


def program_of(path: Path) -> Any:
    """The module that a file is for: its first command line says so."""
    (name,) = set(re.findall(r"python examples/(\w+)\.py", path.read_text()))
    return importlib.import_module(name)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_a_printed_configuration_reads_back_equal(
    path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`--print_config`, loaded again, prints the same; nothing of ours is lost on the way."""
    texts = [path.read_text()]
    for turn in range(2):
        (tmp_path / f"{turn}.yaml").write_text(texts[-1])
        with pytest.raises(SystemExit) as ended:
            program_of(path).main(["--config", str(tmp_path / f"{turn}.yaml"), "--print_config"], run=False)
        assert ended.value.code == 0
        texts.append(capsys.readouterr().out)
    assert texts[1] == texts[2]
    for written, read in zip(*(entries(yaml.safe_load(text)) for text in texts[:2]), strict=True):
        for name, value in written["init_args"].items():
            assert holds(read["init_args"][name], value), name


def holds(read: Any, written: Any) -> bool:
    """Whether all that was written was read, in objects and lists of them beside their defaults."""
    if isinstance(written, dict):
        return all(holds(read[name], value) for name, value in written.items())
    if isinstance(written, list):
        return len(read) == len(written) and all(map(holds, read, written))
    return str(read) == str(written) or read == written


@pytest.mark.parametrize(
    ("option", "kind", "words"),
    [
        ("callbacks", SparseCheckpoint, ["one run per URL", "smallest that fits", "torchrun and SLURM", "gc.freeze"]),
        (
            "callbacks",
            DenseCheckpoint,
            ["optimizer steps between two snapshots in memory", "refuses to start a new one"],
        ),
        ("callbacks", PartialExpertCheckpoint, ["saved longest ago", "refuses to start a new one", "default: 0:00:25"]),
        ("callbacks", SelectiveExpertCheckpoint, ["while a step computes", "refuses to start a new one"]),
        ("callbacks", ExpertLoadMonitor, ["optimizer steps between two rows"]),
        ("callbacks", FaultInjector, ["faults at given places of training", "MOE_CKPT_FAULTS"]),
        ("strategy", MoEStrategy, ["ranks that share one set of experts", "adds gradients in rank order"]),
    ],
)
def test_help_explains_every_argument(
    option: str, kind: type, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is there, with a text beside its type."""
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        cli.main([f"--trainer.{option}.help={kind.__module__.split('._')[0]}.{kind.__name__}"], run=False)
    said = capsys.readouterr().out
    for name in arguments(kind):
        text = re.search(rf"^  --trainer\.{option}\.{name} .*\n? +(\S.*)\((required, )?type: ", said, re.MULTILINE)
        assert text is not None, name
        assert len(text[1]) > 10, name
    assert [word for word in words if word not in said] == []


CHECKPOINTS = pytest.mark.parametrize(
    "kind",
    [DenseCheckpoint, DifferentialCheckpoint, PartialExpertCheckpoint, SelectiveExpertCheckpoint, SparseCheckpoint],
)


@CHECKPOINTS
def test_a_signature_spells_out_what_all_checkpoint_callbacks_take(kind: type) -> None:
    """Each with the type and the default that it has, by keyword, and nothing that takes any name."""
    parameters = inspect.signature(kind).parameters
    shared = [parameters[name] for name in CheckpointArguments.__annotations__]
    assert {parameter.kind for parameter in parameters.values()} == {
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    }
    assert {each.name: each.annotation for each in shared} == get_type_hints(CheckpointArguments)
    built = kind("/ckpt")
    for each in shared:
        if each.name not in {"keep", "retention"}:
            assert getattr(built, each.name) == each.default, each.name
    assert (built.keep, built.retention) == (2, Retention(last=2))


@CHECKPOINTS
def test_a_mistyped_argument_is_an_error_that_says_whose(kind: type) -> None:
    """In Python a TypeError, as for any function; it names the callback and what was meant, or what there is."""
    with pytest.raises(TypeError, match=rf"^`{kind.__name__}\(kepp=\.\.\.\)`.*Did you mean `keep`\?$"):
        kind("/ckpt", kepp=3)
    with pytest.raises(TypeError, match=rf"^`{kind.__name__}\(colour=.*It takes url, .*, freeze_heap\.$"):
        kind("/ckpt", colour="red")


def test_a_mistyped_argument_in_a_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The name as written, and the callback that was asked."""
    document = example("dense.yaml")
    document["trainer"]["callbacks"][0]["init_args"]["kepp"] = 3
    (tmp_path / "mistyped.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(SystemExit) as ended:
        cli.main(["--config", str(tmp_path / "mistyped.yaml")], run=False)
    assert ended.value.code == 2
    said = capsys.readouterr().err.rstrip().splitlines()
    assert (
        said[-1] == "lightning_moe_ckpt: `DenseCheckpoint(kepp=...)`: there is no such argument. Did you mean `keep`?"
    )


@pytest.mark.parametrize(
    ("option", "last"),
    [
        ("--trainer.callbacks.init_args.every_n_step=3", "`DenseCheckpoint(every_n_step=...)`: there is no such argument. Did you mean `every_n_steps`?"),
        ("--trainer.strategy.init_args.expert_paralel=2", "`MoEStrategy(expert_paralel=...)`: there is no such argument. Did you mean `expert_parallel`?"),
        ("--trainer.callbacks=lightning_moe_ckpt.callbacks.DenseChekpoint", "there is no such class. Did you mean `DenseCheckpoint`?"),
        ("--trainer.callbacks.init_args.every_n_steps=[1]", "`DenseCheckpoint(every_n_steps=[1])` must be a whole number or null."),
        ("--trainer.callbacks.init_args.keep=yes", "`DenseCheckpoint(keep=True)` must be a whole number or null."),
        ("--trainer.callbacks.init_args.resume=perhaps", "`DenseCheckpoint(resume=perhaps)` must be auto, must, never or memory."),
        ("--trainer.callbacks.init_args.storage_options=x", "`DenseCheckpoint(storage_options=x)` must be a mapping or null."),
        ("--trainer.callbacks.init_args.retention={'last':'x'}", "`Retention(last=x)` must be a whole number."),
        ("--trainer.strategy.init_args.expert_parallel=x", "`MoEStrategy(expert_parallel=x)` must be a whole number."),
    ],
)  # fmt: skip
def test_the_last_line_about_a_wrong_name_or_type_says_what_is_meant(
    option: str, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Above it stands what LightningCLI has to say of every type that it could have been."""
    with pytest.raises(SystemExit) as ended:
        cli.main(
            ["--config", str(EXAMPLES / ("sparse.yaml" if "strategy" in option else "dense.yaml")), option], run=False
        )
    assert ended.value.code == 2
    (*_, said) = capsys.readouterr().err.rstrip().splitlines()
    assert said.startswith("lightning_moe_ckpt: ")
    assert said.endswith(last), said


def imported(*names: str) -> str:
    """What LightningCLI says of a misspelt class, in a process that has neither its module nor ours until it imports them."""

    def work(_: int) -> str:
        del sys.modules["lightning.pytorch.cli"]
        for name in names:
            importlib.reload(sys.modules[name]) if name in sys.modules else importlib.import_module(name)
        program, misspelt = sys.modules["lightning.pytorch.cli"], "lightning_moe_ckpt.callbacks.DenseChekpoint"
        with redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit):
            program.LightningCLI(BoringModel, run=False, args=[f"--trainer.callbacks={misspelt}"])
        return said.getvalue()

    return run_world(1, work, process_group=False)[0]


def test_the_order_of_imports_does_not_matter() -> None:
    """The package before LightningCLI's module, or behind it."""
    both = ["lightning_moe_ckpt.strategy", "lightning.pytorch.cli"]
    for said in (imported(*both), imported(*both[::-1])):
        assert said.rstrip().endswith("there is no such class. Did you mean `DenseCheckpoint`?"), said[-500:]


def test_without_jsonargparse_lightning_says_what_to_install() -> None:
    """Its parser is an empty class then, which has nothing to explain; our import must not be what fails."""
    module = ModuleType("lightning.pytorch.cli")
    empty = type("LightningArgumentParser", (), {})
    vars(module)["LightningArgumentParser"] = empty
    _cli._explain(module)
    assert not hasattr(empty, "error")
    assert not hasattr(empty, "explains_moe_ckpt")


def test_a_value_that_is_refused_is_an_error_of_ours(tmp_path: Path) -> None:
    """Not one about the types that the callback could have been: a traceback ends with the reason, the call and what is wanted."""
    option = "--trainer.callbacks.init_args.every_n_steps=0"
    with pytest.raises(
        ConfigurationError, match=r"^`DenseCheckpoint\(every_n_steps=0\)` must be None or 1 or more"
    ) as raised:
        cli.main(["--config", str(EXAMPLES / "dense.yaml"), option], run=False)
    assert raised.value.__suppress_context__


@pytest.mark.parametrize(("given", "wanted"), [("25", 25), ("90s", 90), ("1min", 60), ("0:00:30", 30)])
def test_times_and_sizes_of_a_file_may_have_units(given: str, wanted: int) -> None:
    """As in Python: a number is seconds."""
    options = [f"--trainer.callbacks.init_args.stop_grace={given}", "--trainer.callbacks.init_args.bandwidth=400MB"]
    built = cli.main(["--config", str(EXAMPLES / "dense.yaml"), *options], run=False)
    dense = callback(built, DenseCheckpoint)
    assert (dense.stop_grace, dense.bandwidth) == (timedelta(seconds=wanted), 400 * 10**6)


def train(url: Path, steps: int, resume: str) -> int | None:
    """A fit of `examples/dense.yaml`, made small, in a process of its own; where it resumed."""
    document = example("dense.yaml")
    document["trainer"] |= {
        "logger": False,
        "max_steps": steps,
        "limit_val_batches": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(url.parent),
    }
    document["trainer"]["callbacks"][0]["init_args"] |= {"url": str(url), "every_n_steps": 1, "resume": resume}
    document["model"]["architecture"] = {"num_blocks": 1, "model_dim": 16, "num_heads": 2, "num_experts": 4}
    document["data"] = {"context": 8, "batch_size": 4, "train_crops": 64, "val_crops": 4}
    path = url.parent / "config.yaml"
    path.write_text(yaml.safe_dump(document))

    def life(_: int) -> int | str | None:
        built = cli.main(["--config", str(path)], run=False)
        try:
            built.trainer.fit(built.model, built.datamodule)
        except NoUsableGeneration as error:
            return str(error)
        resumed: int | None = callback(built, DenseCheckpoint).report.resumed_from
        return resumed

    # Else the process group of the strategy would stay in this process, for tests that fork later.
    (end,) = run_world(1, life, timeout=timedelta(seconds=60), process_group=False)
    if isinstance(end, str):
        raise NoUsableGeneration(end)
    return end


def listed(url: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert moe_ckpt(["ls", str(url), "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_resume_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`must` refuses where there is no run, `auto` starts and goes on, `never` starts a second run beside the first."""
    url = tmp_path / "run"
    with pytest.raises(NoUsableGeneration, match='holds no run, and resume="must" asks for one'):
        train(url, 2, "must")
    assert train(url, 2, "auto") is None
    first = listed(url, capsys)
    assert train(url, 3, "auto") == 2
    assert train(url, 4, "must") == 3
    older = {row["step"] for row in listed(url, capsys)["generations"]}

    assert train(url, 1, "never") is None
    second = listed(url, capsys)
    assert second["run_id"] != first["run_id"]
    usable = {row["step"]: row["usable"] for row in second["generations"]}
    assert older & usable.keys(), "the first run lies there until the second has more than it keeps"
    assert usable[1]
    assert not any(usable[step] for step in older & usable.keys() - {1})

    assert train(url, 2, "auto") == 1, "goes on with the newest run, not with the longest"
    assert listed(url, capsys)["run_id"] == second["run_id"]
