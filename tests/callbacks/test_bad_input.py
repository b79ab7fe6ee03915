"""What a user can get wrong: found, wanted, what to do; every rank stops; what is stored stays whole."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import tiny
import torch
from door import CheckpointCallback, checkpoint_of
from fsspec.implementations.memory import MemoryFileSystem
from launcher import run_world
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moe_ckpt.callbacks import (
    DenseCheckpoint,
    DifferentialCheckpoint,
    PartialExpertCheckpoint,
    SparseCheckpoint,
)
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError, Fenced, IdentityMismatch, UnknownLayout
from lightning_moe_ckpt.inspection import verify
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.recovery import RestoreSource
from lightning_moe_ckpt.snapshot import _lay_out
from lightning_moe_ckpt.storage import Retention, SegmentLayout, _segment, open_backend
from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.tiers import _shm

FEATURES = 4
NOBODY = 65534


class Net(LightningModule):
    """A model and an optimizer that can be built a little differently each time."""

    def __init__(
        self,
        *,
        layers: dict[str, int] | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
        groups: int = 1,
        frozen: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {name: nn.Linear(FEATURES, size) for name, size in (layers or {"a": 3, "b": 2}).items()}
        )
        self.build, self.groups = optimizer, groups
        if frozen is not None:
            self.frozen = nn.Parameter(frozen, requires_grad=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return torch.stack([layer(batch[0]).pow(2).mean() for layer in self.layers.values()]).sum()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", batch[0].mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        chosen = [p for p in self.parameters() if p.requires_grad]
        return self.build([{"params": chosen[i :: self.groups]} for i in range(self.groups)])


class Experts(Net):
    """With experts, built where the ranks are known."""

    def configure_model(self) -> None:
        if "moe" not in self.layers:
            self.layers["moe"] = MoELayer(FEATURES, 8, 4)


def loader() -> DataLoader[Any]:
    return tiny.rows(tiny.waves(4 * 6, FEATURES), 2)


def trainer_for(checkpoint: CheckpointCallback, *others: Callback, steps: int = 3, **options: Any) -> Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return tiny.quiet_trainer(*others, checkpoint, max_steps=steps, **options)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about these tiny runs
        yield


def fit(
    checkpoint: CheckpointCallback, module: LightningModule | None = None, *others: Callback, **options: Any
) -> Trainer:
    trainer = trainer_for(checkpoint, *others, **options)
    trainer.fit(module if module is not None else Net(), loader())
    return trainer


def told(work: Callable[[], object]) -> str:
    """What a rank that must fail says, and as what."""
    try:
        work()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def every_rank(world_size: int, checkpoint: Callable[[int], CheckpointCallback], **options: Any) -> list[str]:
    """What each rank of a world says that must fail as a whole; none may be left waiting."""

    def work(rank: int) -> str:
        warnings.simplefilter("ignore")
        strategy = MoEStrategy(expert_parallel=options.pop("expert_parallel", 1))
        module = options.pop("module", Net)()
        return told(lambda: fit(checkpoint(rank), module, devices=world_size, strategy=strategy, **options))

    return run_world(world_size, work, timeout=timedelta(seconds=60), process_group=False)


def test_expert_parallelism_that_shards_nothing_stops_all_ranks(tmp_path: Path) -> None:
    """Such as experts of Hugging Face, of which every rank has all."""

    class Theirs(Net):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))

    for said in every_rank(2, lambda _: DenseCheckpoint(tmp_path), module=Theirs, expert_parallel=2):
        assert said.startswith("ConfigurationError: `expert_parallel=2` would have no effect: found `experts.0.weight`")
        assert "build `MoELayer`" in said


def whole(url: Path) -> list[str]:
    """Generations of a run in which every byte is as it was written."""
    verdict = verify(open_backend(str(url)))
    assert verdict.sound, verdict.problems
    return verdict.generations


# -- places


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("{root}/run/", "run"),
        ("run/of/today", "run/of/today"),
        ("~/run", "run"),
        ("file://{root}/run", "run"),
        ("{root}/späte Läufe/実験 1", "späte Läufe/実験 1"),
        ("{root}/what?#x%20y", "what?#x%20y"),
    ],
)
def test_a_place_can_be_spelled_in_many_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, place: str
) -> None:
    """All of them are one folder, which is also found by a path object."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    fit(DenseCheckpoint(url.replace("{root}", str(tmp_path)), every_n_steps=1))
    assert (tmp_path / place / "snap").is_dir()
    again = DenseCheckpoint(tmp_path / place, resume="must", every_n_steps=1)
    fit(again, steps=4)
    assert again.report.resumed_from == 3
    assert [path.name for path in tmp_path.iterdir()] == [place.split("/", maxsplit=1)[0]]


@pytest.mark.parametrize(
    ("url", "found", "remedy"),
    [
        ("", "`url=''` names no place", "Give a folder"),
        ("  ", "names no place", "Give a folder"),
        (None, "`url=None` is a NoneType", "Give a path or a URL"),
        (b"/tmp/x", "is a bytes", "Give a path or a URL"),
        ("file:/data/run", "neither a path nor a URL", "`file:///data/run`"),
        ("s3:bucket/run", "neither a path nor a URL", "`s3://bucket/run`"),
        ("s3://bucket/run?versionId=1", "has a query", "storage_options"),
        ("simplecache::s3://bucket/run", "chains file systems", "Name one store"),
    ],
)
def test_what_is_no_place_is_refused_at_once(url: Any, found: str, remedy: str) -> None:
    """When the callback is made, before anything is built."""
    for make in (DenseCheckpoint, SparseCheckpoint):
        with pytest.raises(ConfigurationError) as caught:
            make(url)
        assert found in str(caught.value)
        assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("oss://bucket/run", ["`oss://bucket/run` needs a package", "Install ossfs", "pip"]),
        ("nosuch://run", ["there is no file system called nosuch", "Name a path, or a URL that fsspec knows"]),
        ("memory://run", ["memory of one process, and this run has 3", "Give a path or URL that all of them reach"]),
    ],
)
def test_a_store_that_is_not_there_stops_all_ranks(url: str, words: list[str]) -> None:
    """At start; the message names the package."""
    for said in every_rank(3, lambda _: DenseCheckpoint(url)):
        assert said.startswith("ConfigurationError")
        assert [word for word in words if word not in said] == []


def test_a_package_that_one_machine_lacks_stops_all_ranks() -> None:
    """The others do not wait for that rank, and say which it is."""

    def checkpoint(rank: int) -> DenseCheckpoint:
        if rank != 1:
            fsspec.register_implementation("here", MemoryFileSystem)
        return DenseCheckpoint("here://run")

    for said in every_rank(3, checkpoint):
        assert "rank 1: `here://run`: there is no file system called here" in said


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("obstacle", ["file", "read-only"])
def test_a_place_that_cannot_be_written_stops_all_ranks(tmp_path: Path, obstacle: str, world_size: int) -> None:
    """A file where a folder should be, and a folder of somebody else's; nothing is made there."""
    place = tmp_path / "place"
    if obstacle == "file":
        place.write_text("mine")
    else:
        place.mkdir()
        place.chmod(0o555)
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)

    def checkpoint(_: int) -> DenseCheckpoint:
        if os.getuid() == 0:  # may write anything
            os.seteuid(NOBODY)
        return DenseCheckpoint(place / "run")

    for said in every_rank(world_size, checkpoint):
        assert said.startswith("ConfigurationError")
        assert "cannot be written" in said
        assert "Give a URL this user may write to" in said
    assert place.read_text() == "mine" if obstacle == "file" else list(place.iterdir()) == []


# -- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0}, "`SparseCheckpoint(keep=0)` must be None or 1 or more generations"),
        ({"keep": "2"}, "`SparseCheckpoint(keep='2')` must be"),
        ({"keep": True}, "`SparseCheckpoint(keep=True)` must be"),
        ({"keep": 2, "retention": Retention(last=3)}, "short for `retention=Retention(last=2)`. Give one of the two."),
        ({"retention": 3}, "`SparseCheckpoint(retention=3)` must be a Retention, such as Retention(last=3)"),
        ({"window": 0}, "`SparseCheckpoint(window=0)` must be 'auto' or 1 or more steps"),
        ({"window": -3}, "`SparseCheckpoint(window=-3)` must be"),
        ({"window": 4, "every_n_steps": 3}, "`SparseCheckpoint(every_n_steps=3)`: a window takes 4 steps"),
        ({"schedule": [["a"], ["b"]], "every_n_steps": 1}, "a window takes 2 steps, and windows do not overlap"),
        ({"window": "auot"}, "`SparseCheckpoint(window='auot')` must be 'auto'"),
        ({"window": 2.5}, "`SparseCheckpoint(window=2.5)` must be"),
        ({"max_window": 0}, "`SparseCheckpoint(max_window=0)` must be"),
        ({"budget_nbytes": "1G"}, "`SparseCheckpoint(budget_nbytes='1G')` must be None or 1 or more bytes"),
        ({"over_budget": "wait"}, "`SparseCheckpoint(over_budget='wait')` must be 'stall' or 'dense'"),
        ({"storage_options": "key=1"}, "must be a dict"),
        (
            {"overhead_target": 0.0},
            "`SparseCheckpoint(overhead_target=0.0)` must be None or a share of training's time",
        ),
        ({"overhead_target": 3}, "`SparseCheckpoint(overhead_target=3)` must be None or a share"),
        ({"overhead_target": "fast"}, "`SparseCheckpoint(overhead_target='fast')` must be None or a share"),
        ({"storage_at_least": timedelta(0)}, "`SparseCheckpoint(storage_at_least=0:00:00)` must be positive"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_quoted(arguments: dict[str, Any], message: str) -> None:
    """Also one that Python would take for a number, and one that fails only much later."""
    with pytest.raises(ConfigurationError) as caught:
        SparseCheckpoint("run", **arguments)
    assert message in str(caught.value)


def test_an_unknown_argument_is_pythons_error() -> None:
    """It names the argument."""
    with pytest.raises(TypeError, match="windows"):
        SparseCheckpoint("run", windows=3)  # type: ignore[call-arg]


def test_a_schedule_is_checked_before_anything_is_stored(tmp_path: Path) -> None:
    """Operators are known at start."""
    with pytest.raises(
        ConfigurationError, match=r"Not named: \['layers.a', 'layers.b'\].*\['nosuch'\].*`moe-ckpt inspect`"
    ):
        fit(SparseCheckpoint(tmp_path / "run", schedule=[["nosuch"]]))
    assert list(tmp_path.iterdir()) == []


def test_two_checkpoint_callbacks_name_each_other(tmp_path: Path) -> None:
    """Nothing is stored by either."""
    with pytest.raises(ConfigurationError, match=r"DenseCheckpoint and SparseCheckpoint in one Trainer.*Keep one"):
        fit(SparseCheckpoint(tmp_path / "a"), Net(), DenseCheckpoint(tmp_path / "b"))
    assert list(tmp_path.iterdir()) == []


def test_a_window_longer_than_the_run_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Start and end are stored all the same."""
    with caplog.at_level(logging.WARNING):
        fit(SparseCheckpoint(tmp_path / "run", window=6), Net(layers=dict.fromkeys("abcdef", 2)))
    (said,) = (record.getMessage() for record in caplog.records if "Shorten the window" in record.getMessage())
    assert "checkpoints need 6 steps and this fit ends at step 3" in said
    assert whole(tmp_path / "run") == ["step 3 (incarnation 1)", "step 0 (incarnation 1)"]


def test_a_budget_smaller_than_an_element_still_checkpoints(tmp_path: Path) -> None:
    """Slot 0 waits, as `over_budget='stall'` says."""
    checkpoint = SparseCheckpoint(tmp_path / "run", budget_nbytes=1)
    fit(checkpoint, steps=20)
    assert checkpoint.report.window > 1
    assert whole(tmp_path / "run")


# -- nothing to train


def test_a_run_without_a_training_step_stores_nothing(tmp_path: Path) -> None:
    """Validation only, a smoke test, and no step at all; later a run starts there as if nothing had been."""
    trainer_for(SparseCheckpoint(tmp_path / "run")).validate(Net(), loader(), verbose=False)
    fit(SparseCheckpoint(tmp_path / "run"), fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []
    fit(SparseCheckpoint(tmp_path / "run"), steps=0)
    assert not (tmp_path / "run" / "snap").exists()
    checkpoint = DenseCheckpoint(tmp_path / "run", every_n_steps=1)
    fit(checkpoint)
    assert checkpoint.report.resumed_from is None


def test_a_smoke_test_leaves_a_run_alone(tmp_path: Path) -> None:
    """`fast_dev_run` neither resumes from it nor adds to it."""
    fit(DenseCheckpoint(tmp_path / "run", every_n_steps=1))
    before = contents(tmp_path)
    trainer = fit(DenseCheckpoint(tmp_path / "run", every_n_steps=1), fast_dev_run=2)
    assert trainer.global_step == 2
    assert contents(tmp_path) == before


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


# -- another model, optimizer, machine setup


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `Net()` on one rank."""
    url = tmp_path_factory.mktemp("run") / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(DenseCheckpoint(url, every_n_steps=1))
    return url


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1)


def amsgrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, amsgrad=True)


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"layers": {"a": 3, "b": 2, "c": 1}}, "`layers.c.weight` ([1, 4] F32) of the model is not in the run"),
        ({"layers": {"a": 3}}, "`layers.b.weight` ([2, 4] F32) of the run is not in the model"),
        ({"layers": {"a": 3, "b": 5}}, "`layers.b.bias`: [2] F32 in the run, [5] F32 now"),
        ({"layers": {"a": 3, "z": 2}}, "`layers.b.weight` of the run is called `layers.z.weight` now"),
        ({"optimizer": sgd}, "optimizer: class AdamW in the run, class SGD now"),
        ({"optimizer": amsgrad}, "state exp_avg, exp_avg_sq, max_exp_avg_sq, step now"),
        ({"groups": 2}, "groups of [4] parameters in the run, groups of [2, 2] parameters now"),
        ({"precision": "bf16-true"}, "`layers.a.weight`: [3, 4] F32 in the run, [3, 4] BF16 now"),
        ({"precision": "bf16-mixed"}, "autocast: none in the run, bfloat16 now"),
    ],
)
def test_what_differs_from_the_run_is_named(run: Path, changed: dict[str, Any], difference: str) -> None:
    """With what to do; and not a byte of the run is touched."""
    before = contents(run)
    options = {"precision": changed.pop("precision")} if "precision" in changed else {}
    for resume in ("auto", "must"):
        with pytest.raises(IdentityMismatch) as caught:
            fit(DenseCheckpoint(run, every_n_steps=1, resume=resume), Net(**changed), **options)
        assert difference in str(caught.value)
        assert "Resume with what wrote it" in str(caught.value)
        assert "resume='never'" in str(caught.value)
    assert contents(run) == before
    assert len(whole(run)) == 2


class Fails(Callback):
    """Ends a fit before its last generation, which has everything."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == 3:
            checkpoint = checkpoint_of(trainer)
            assert checkpoint is not None
            assert checkpoint.wait_committed()
            raise RuntimeError("enough")


@pytest.mark.parametrize("policy", [DifferentialCheckpoint, PartialExpertCheckpoint])
@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"optimizer": sgd}, "one: optimizer: class AdamW in the run, class SGD now"),
        ({"groups": 2}, "one: optimizer: groups of [9] parameters in the run, groups of [5, 4] parameters now"),
        ({"layers": {"a": 3}}, "one: parameter `layers.b.weight`"),
        ({"layers": {"a": 3, "b": 2, "c": 1}}, "one: parameter `layers.c.weight` ([1, 4] F32) of the model is not in"),
    ],
)
def test_parameters_without_a_record_are_not_called_missing(
    policy: Callable[..., CheckpointCallback], changed: dict[str, Any], difference: str, tmp_path: Path
) -> None:
    """Where the newest generation has differences, or a part of the experts, alone; what wrote it goes on."""
    with pytest.raises(RuntimeError, match="enough"):
        fit(policy(tmp_path / "run", overhead_target=None), Experts(), Fails(), steps=5)
    with pytest.raises(IdentityMismatch) as caught:
        fit(policy(tmp_path / "run"), Experts(**changed))
    assert difference in str(caught.value)
    fit(policy(tmp_path / "run"), Experts(), steps=5)


def test_weights_can_be_carried_over_to_another_optimizer(run: Path, tmp_path: Path) -> None:
    """As the message says: through an export, into a run of its own."""
    from lightning_moe_ckpt.inspection import export

    export(open_backend(str(run)), tmp_path / "m.ckpt")
    module = Net(optimizer=sgd)
    module.load_state_dict(torch.load(tmp_path / "m.ckpt", weights_only=True)["state_dict"])
    fit(DenseCheckpoint(tmp_path / "run", every_n_steps=1), module)
    assert whole(tmp_path / "run")


def test_another_number_of_ranks_stops_all_of_them_where_it_is_refused(run: Path) -> None:
    """Three ranks on a run of one; nothing of it changes."""
    before = contents(run)
    for said in every_rank(3, lambda _: DenseCheckpoint(run, elastic="refuse")):
        assert said.startswith("IdentityMismatch")
        assert "elastic='auto'" in said
        assert "processes: 1 in the run, 3 now" in said
    assert contents(run) == before


def test_experts_spread_otherwise_stop_all_ranks(tmp_path: Path) -> None:
    """The same number of ranks, the same model, another place for the experts; and ranks that lost one."""
    url = tmp_path / "run"
    assert (
        every_rank(2, lambda _: DenseCheckpoint(url, every_n_steps=1), module=Experts, expert_parallel=2)
        == ["nothing"] * 2
    )
    before = contents(url)
    for said in every_rank(2, lambda _: DenseCheckpoint(url, elastic="refuse"), module=Experts):
        assert "expert_parallel: 2 in the run, 1 now" in said
        assert "parameter" not in said
    assert "processes: 2 in the run, 1 now" in told(lambda: fit(DenseCheckpoint(url, elastic="refuse"), Experts()))
    assert contents(url) == before


def test_a_model_that_differs_on_one_rank_stops_all_of_them(tmp_path: Path) -> None:
    """Found before anything is loaded: nobody waits for that rank."""
    url = tmp_path / "run"
    assert every_rank(3, lambda _: DenseCheckpoint(url, every_n_steps=1)) == ["nothing"] * 3
    ranks: list[int] = []

    def checkpoint(rank: int) -> DenseCheckpoint:
        ranks.append(rank)  # in the rank's own process
        return DenseCheckpoint(url)

    class Differing(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return amsgrad(self.parameters()) if ranks == [1] else torch.optim.AdamW(self.parameters())

    for said in every_rank(3, checkpoint, module=Differing):
        assert said.startswith("IdentityMismatch")


def test_records_that_differ_on_one_rank_stop_all_of_them(tmp_path: Path) -> None:
    """What one rank cannot use of its own segments is said by every rank, with which rank it is."""
    url = tmp_path / "run"
    assert every_rank(3, lambda _: DenseCheckpoint(url, every_n_steps=1)) == ["nothing"] * 3

    def checkpoint(rank: int) -> DenseCheckpoint:
        if rank == 1:  # in a process of its own
            check = RestoreSource.check_layouts
            other = SegmentLayout([], metadata={})
            RestoreSource.check_layouts = lambda found, _: check(found, [other] * len(found.steps))  # type: ignore[assignment, method-assign]
        return DenseCheckpoint(url)

    for said in every_rank(3, checkpoint):
        assert said.startswith("IdentityMismatch: rank 1: ")


# -- parameters that are no plain numbers


class Packed(Tensor):
    """What quantisation libraries put in place of a parameter's tensor."""


@pytest.mark.parametrize(
    ("frozen", "found"),
    [
        (torch.zeros(4).to(torch.float8_e8m0fnu), "`frozen` has dtype torch.float8_e8m0fnu (quantised or complex)"),
        (torch.zeros(4, dtype=torch.complex64), "`frozen` has dtype torch.complex64"),
        (torch.zeros(4).as_subclass(Packed), "`frozen` is a tensor subclass (Packed)"),
    ],
)
def test_parameters_that_cannot_be_cut_are_refused_by_name(tmp_path: Path, frozen: Tensor, found: str) -> None:
    """At start, with the way out, and before the place is touched."""
    with pytest.raises(UnknownLayout) as caught:
        fit(DenseCheckpoint(tmp_path / "run"), Net(frozen=frozen))
    assert found in str(caught.value)
    assert "keep what is not trained in buffers" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_way_out_works(tmp_path: Path) -> None:
    """Weights of any type in a buffer are stored and come back bit for bit."""

    def net(value: float) -> Net:
        module = Net()
        module.register_buffer("frozen", torch.full((4,), value).to(torch.float8_e4m3fn))
        return module

    fit(DenseCheckpoint(tmp_path / "run", every_n_steps=1), net(1.5))
    resumed = net(0.0)
    fit(DenseCheckpoint(tmp_path / "run", every_n_steps=1), resumed, steps=4)
    assert torch.equal(resumed.get_buffer("frozen").float(), torch.full((4,), 1.5))


# -- memory


def test_too_little_shared_memory_on_one_machine_stops_all_ranks(tmp_path: Path) -> None:
    """Before training, with the number that is missing; the others name the rank."""

    def checkpoint(rank: int) -> SparseCheckpoint:
        if rank == 1:
            mock.patch.object(_shm, "_free_nbytes", return_value=100).start()  # in the rank's own process
        return SparseCheckpoint(tmp_path / "run", window=2)

    said = every_rank(3, checkpoint)
    assert len(set(said)) == 1
    words = ["rank 1: A ring of ", "<0.01 MiB are free", "are missing", "--shm-size"]
    assert [word for word in words if word not in said[0]] == []


def test_too_little_shared_memory_for_a_plan_stops_all_ranks(tmp_path: Path) -> None:
    """Enough for what is known at start, too little for the window that was planned then."""

    def checkpoint(rank: int) -> SparseCheckpoint:
        if rank == 2:
            mock.patch.object(_shm, "_free_nbytes", side_effect=[10**9, *[100] * 9]).start()
        return SparseCheckpoint(tmp_path / "run", window=2)

    said = every_rank(3, checkpoint, steps=20)
    assert len(set(said)) == 1
    assert "rank 2: A ring of " in said[0]
    assert whole(tmp_path / "run") == ["step 0 (incarnation 1)"]


# -- two jobs


class Intruder(Callback):
    """At step 2 another job is started on the same URL, in a process of its own, and runs to its end."""

    def __init__(self, url: Path, resume: Any) -> None:
        self.url, self.resume, self.report = url, resume, None

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == 2:

            def work(rank: int) -> Any:
                second = DenseCheckpoint(self.url, every_n_steps=1, resume=self.resume)
                return fit(second, steps=6).global_step, second.report.resumed_from

            (self.report,) = run_world(1, work, timeout=timedelta(seconds=60), process_group=False)


class Patient(Callback):
    """Waits for what is under way, so that each checkpoint is taken however fast the steps are."""

    def __init__(self, checkpoint: CheckpointCallback) -> None:
        self.checkpoint = checkpoint

    def on_train_batch_start(self, *_: object) -> None:
        self.checkpoint.wait_committed(20)


def test_more_tensors_than_a_file_describes_are_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers have a limit, which 40,000 operators on one rank exceed: here a few do. Nothing has been written by then."""
    for module in (_lay_out, _segment):
        monkeypatch.setattr(module, "MAX_HEADER_NBYTES", 4000)
    said = told(lambda: fit(DenseCheckpoint(tmp_path / "run", every_n_steps=1), Net(), steps=1))
    assert said.startswith(ConfigurationError.__name__)
    assert "operators are more than one rank can store" in said
    assert "`expert_parallel` spreads experts" in said
    assert not (tmp_path / "run").exists() or not contents(tmp_path / "run")


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_of_two_jobs_on_one_url_the_later_goes_on(tmp_path: Path, resume: Any) -> None:
    """The earlier stops and says why; what is stored afterwards is the later job's alone, and whole."""
    url = tmp_path / "run"

    def first(_: int) -> tuple[str, Any]:
        checkpoint = DenseCheckpoint(url, every_n_steps=1, overhead_target=None)
        intruder = Intruder(url, resume)
        said = told(lambda: fit(checkpoint, Net(), intruder, Patient(checkpoint), steps=40))
        return said, intruder.report

    ((said, report),) = run_world(1, first, timeout=timedelta(seconds=90), process_group=False)
    assert said.startswith(Fenced.__name__)
    assert "a later start of this run has taken over" in said
    assert "give one of the two jobs another URL" in said
    assert report == (6, 1 if resume == "auto" else None)
    assert whole(url)[0] == "step 6 (incarnation 2)"
    assert all("incarnation 2" in generation for generation in whole(url))
