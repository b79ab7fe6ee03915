"""Checkpoint systems in `moe-ckpt bench peers`, each saving and loading as its documentation shows first.

All save the same state: module, optimizer, schedule and step. A save must not alias tensors of a CPU, and two systems take
them for tensors of a device: where NVRx would copy from the device, a clone stands here.

Sources: DLRover Flash Checkpoint, github.com/intelligent-machine-learning/dlrover, `docs/blogs/flash_checkpoint.md`; lm-resiliency,
github.com/LMResiliency/lm-resiliency, `docs/gemini.md`; NVRx, github.com/NVIDIA/nvidia-resiliency-ext, `docs/source/checkpointing`.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported at run time only
from torch.distributed.checkpoint import state_dict_saver
from typing_extensions import override

from benchmarks.peers_saving import DcpCheckpoint, MeteredCheckpoint, SavingEvery, nbytes_of, state_dicts
from lightning_moe_ckpt.benchmarks._overhead import Variant, checkpoint_of

_Place = Literal["memory", "storage"]


class StateSaving(SavingEvery):
    """Save the state dicts of a training, and go on from the newest ones where there are any."""

    _keeper: Any = None
    _saved = 0
    """Newest step whose `write` has returned."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _join_world()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.open()
            state = self.load()
        if state:
            pl_module.load_state_dict(state["model"])
            trainer.optimizers[0].load_state_dict(state["optimizer"])
            for config, saved in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
                config.scheduler.load_state_dict(saved)
            self.first_step = state["step"]

    @override
    def save(self, step: int, trainer: Trainer, module: LightningModule) -> int:
        state = {"step": step, **state_dicts(trainer, module)}
        nbytes = nbytes_of(state)  # some take the tensors out
        self.write(step, state)
        self._saved = step
        return nbytes

    def open(self) -> None:
        """Get ready to load and to save."""
        raise NotImplementedError

    def load(self) -> Any:
        """Return the newest state; `None` if there is none."""
        raise NotImplementedError

    def write(self, step: int, state: dict[str, Any]) -> None:
        """Save `state`, or begin to."""
        raise NotImplementedError

    def newest(self) -> int:
        """Return the newest step for a restart; 0 for none. Called from any thread."""
        return self._saved


def _join_world() -> None:
    """Make a process group of this process alone, as other systems want."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


class _Dcp(DcpCheckpoint):
    """torch's Distributed Checkpoint: on the training thread, on a thread beside, or in a process beside."""

    def __init__(self, folder: Path, every: int, how: Literal["sync", "async", "process"]) -> None:
        super().__init__(folder, every_n_steps=every)
        self._how = how

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _join_world()
        self.first_step = self.newest()
        super().on_fit_start(trainer, pl_module)

    @override
    def save(self, step: int, trainer: Trainer, module: LightningModule) -> int:
        if self._how == "async":
            return super().save(step, trainer, module)
        self._wait()
        self._forget_old(trainer)
        state, place = self._state(trainer, module), self._folder / str(step)
        if self._how == "sync":
            state_dict_saver.save(state, checkpoint_id=place)
        else:
            beside = state_dict_saver.AsyncCheckpointerType.PROCESS
            saving: Any = state_dict_saver.async_save(state, checkpoint_id=place, async_checkpointer_type=beside)
            self._saving = getattr(saving, "upload_completion", saving)
        return nbytes_of(state)

    def newest(self) -> int:
        return max((int(path.parent.name) for path in self._folder.glob("*/.metadata")), default=0)


class LightningSaving(MeteredCheckpoint):
    """Lightning's own `.ckpt`, the newest kept."""

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__(folder, every_n_train_steps=every)
        self._place = folder

    @property
    def found(self) -> Path | None:
        """Newest file, for `ckpt_path`: only whole files have such names."""
        return max(self._place.glob("*.ckpt"), key=_step_of, default=None)

    def newest(self) -> int:
        """Return the newest file's step."""
        return _step_of(self.found) if self.found else 0


def _step_of(path: Path) -> int:
    return int(path.stem.rpartition("=")[2].partition("-")[0])


class _Dlrover(StateSaving):
    """DLRover's Flash Checkpoint, into shared memory alone, or also to disk by another process."""

    def __init__(self, folder: Path, every: int, name: str, *, disk: bool) -> None:
        super().__init__(folder, every_n_steps=every)
        self._disk = disk
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": name}

    @override
    def open(self) -> None:
        ddp: Any = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
        storage: Any = importlib.import_module("dlrover.python.common.storage")
        self._kind = ddp.StorageType.DISK if self._disk else ddp.StorageType.MEMORY
        keep = storage.KeepLatestStepStrategy(max_to_keep=2, checkpoint_dir=str(self._folder))
        self._keeper = ddp.DdpCheckpointer(str(self._folder), deletion_strategy=keep)

    @override
    def load(self) -> Any:
        # What it returns lies in its shared memory: an optimizer that takes it would train the copy.
        state = cloned(self._keeper.load_checkpoint())
        return state.get("model_states", state)

    @override
    def write(self, step: int, state: dict[str, Any]) -> None:
        self._keeper.save_checkpoint(step, state, storage_type=self._kind)

    @override
    def newest(self) -> int:
        tracker = self._folder / "dlrover_latest.txt"
        return self._saved if not self._disk else int(tracker.read_text() or 0) if tracker.exists() else 0


def dlrover_agent(name: str) -> multiprocessing.process.BaseProcess:
    """Return a process to keep shared memory when the trainer dies, as `dlrover-run` does.

    Trainers with `BESIDE_AGENT` in their environment start none of their own.
    """
    agent = multiprocessing.get_context("fork").Process(target=_keep, args=(name,), daemon=True)
    agent.start()
    return agent


def _keep(name: str) -> None:
    die_with_parent()
    os.environ["TORCHELASTIC_RUN_ID"] = name
    importlib.import_module("dlrover.trainer.torch.flash_checkpoint.engine").start_async_save()


BESIDE_AGENT = {"ROLE_NAME": "dlrover-trainer"}


class _LmResiliency(StateSaving):
    """lm-resiliency's copy in the process's memory, on one rank without replicas; with `disk` the copy before goes to disk."""

    def __init__(self, folder: Path, every: int, *, disk: bool) -> None:
        super().__init__(folder, every_n_steps=every)
        self._disk, self._copied = disk, 0

    @override
    def open(self) -> None:
        package: Any = importlib.import_module("lm_resiliency")
        config = package.InMemoryCkptConfig(
            enable=True, interval=self._every, disk_flush_interval=self._every if self._disk else 0,
            disk_folder=str(self._folder), run_id="bench", verify_integrity=True, pin_memory=False, replication_jump=1,
        )  # fmt: skip
        self._keeper = importlib.import_module("lm_resiliency.experimental").InMemoryCheckpointManager(config)

    @override
    def load(self) -> Any:
        found = self._keeper.load()
        return found[0] if found is not None else None

    @override
    def write(self, step: int, state: dict[str, Any]) -> None:
        self._keeper.save(state, step)

    @override
    def newest(self) -> int:
        return int(self._keeper._disk.find_latest_on_disk()) if self._disk else self._copied  # noqa: SLF001  # it tells nobody

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: object) -> None:
        began = time.perf_counter()
        self._keeper.maybe_wait()  # it copies until the next optimizer step
        self.seconds += time.perf_counter() - began
        self._copied = self._saved


class _NvrxLocal(StateSaving):
    """NVRx's local checkpoint, written by the training thread, in a folder on a tmpfs."""

    @override
    def open(self) -> None:
        place = f"{_NVRX}.local"
        self._held: Any = importlib.import_module(f"{place}.basic_state_dict").BasicTensorAwareStateDict
        # It asserts tensors of a CUDA device, and puts them there again.
        self._held.__init__ = lambda held, state: held.__dict__.update(state_dict=state, _is_hollow=False)
        self._held.restore_tensor_device = lambda *_, **__: None
        self._held.copy_tensors_to_cpu = lambda held, **_: held.__dict__.update(state_dict=cloned(held.state_dict))
        local: Any = importlib.import_module(f"{place}.ckpt_managers.local_manager")
        self._keeper = local.LocalCheckpointManager(self._folder)

    @override
    def load(self) -> Any:
        return self._keeper.load()[0].state_dict if self._keeper.find_latest() >= 0 else None

    @override
    def write(self, step: int, state: dict[str, Any]) -> None:
        self._keeper.save(self._held(state), step, is_async=False)


class _NvrxAsync(StateSaving):
    """`torch.save` in a process beside, by NVRx's queue; an unfinished save holds up the next."""

    @override
    def open(self) -> None:
        self._request: Any = importlib.import_module(f"{_NVRX}.async_ckpt.core").AsyncRequest
        self._keeper = importlib.import_module(f"{_NVRX}.async_ckpt.torch_ckpt").TorchAsyncCheckpoint()

    @override
    def load(self) -> Any:
        whole = max(self._folder.glob("*.pt"), key=_step_of, default=None)
        return torch.load(whole, weights_only=True) if whole is not None else None

    @override
    def write(self, step: int, state: dict[str, Any]) -> None:
        self._keeper.finalize_async_save(blocking=True)
        staged = self._folder / f"{step}.staged"

        def finish() -> None:
            staged.replace(staged.with_suffix(".pt"))
            for old in sorted(self._folder.glob("*.pt"), key=_step_of)[:-2]:
                old.unlink()

        request = self._request(type(self._keeper).async_fn, (cloned(state), staged), [finish], {})
        self._keeper._async_calls_queue.schedule_async_request(request)  # noqa: SLF001  # past a call to CUDA

    @override
    def on_train_batch_start(self, *args: Any) -> None:
        began = time.perf_counter()
        self._keeper.finalize_async_save(blocking=False)
        self.seconds += time.perf_counter() - began

    @override
    def newest(self) -> int:
        return max(map(_step_of, self._folder.glob("*.pt")), default=0)


def cloned(state: Any) -> Any:
    """Return nested dicts and lists with copies of all tensors."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: cloned(each) for key, each in state.items()}
    return [cloned(each) for each in state] if isinstance(state, list) else state


@dataclass(frozen=True, slots=True)
class PeerSystem:
    """A row: a system, and its place."""

    label: str
    place: _Place
    make: Callable[[Path, int, str], Callback | None]
    """Function of a folder, the steps between two saves, and a unique name."""
    environment: str = ""
    """Name in `REQUIREMENTS`; empty for this package's."""
    modules: tuple[str, ...] = ()
    """Imported before any process is forked."""
    beside: bool = False
    """Whether Lightning's `AsyncCheckpointIO` writes."""

    @property
    def is_ours(self) -> bool:
        """Whether this package saves."""
        return self.label.startswith("ours, ")


_PINNED = {"dlrover": "dlrover==0.6.1", "nvrx": "nvidia-resiliency-ext==0.4.1", "lm-resiliency": "lm-resiliency==0.2.0"}
REQUIREMENTS = {name: (package,) for name, package in _PINNED.items()}
"""Packages of an environment, by its name, beside this package's."""
_NVRX = "nvidia_resiliency_ext.checkpointing"


def _own(policy: str, place: _Place) -> PeerSystem:
    def make(folder: Path, every: int, _: str) -> Callback | None:
        # At the pace that is asked for, as all others; a difference is what the policy takes at every step.
        variant = Variant(policy, 64 if policy == "differential" else every, memory_only=True)
        # Storage that a gate holds up would keep memory that these take: they let it rest.
        rest = {"overhead_target": 1e-4, "storage_at_least": "1h"} if rests(policy, place) else {}
        return checkpoint_of(variant, folder.as_uri(), resume="auto", **rest)

    return PeerSystem(f"ours, {policy}{' at every step' if policy == 'differential' else ''}", place, make)


def rests(policy: str, place: str) -> bool:
    """Return whether storage rests by a target, and no gate holds it up."""
    return place == "memory" and policy.startswith(("differential", "partial", "selective"))


def _systems() -> Iterator[tuple[str, PeerSystem]]:
    dlrover = ("dlrover", ("dlrover.trainer.torch.flash_checkpoint.ddp",))
    resilient = ("lm-resiliency", ("lm_resiliency", "lm_resiliency.experimental"))
    nvrx = ("nvrx", (f"{_NVRX}.local.ckpt_managers.local_manager", f"{_NVRX}.async_ckpt.torch_ckpt"))
    memory, storage = get_args(_Place)
    yield "none", PeerSystem("none, a second time", memory, lambda *_: None)
    yield "dlrover-memory", PeerSystem("DLRover", memory, lambda f, e, n: _Dlrover(f, e, n, disk=False), *dlrover)
    yield "nvrx-local", PeerSystem("NVRx, local", memory, lambda f, e, _: _NvrxLocal(f, every_n_steps=e), *nvrx)
    yield (
        "lm-resiliency-memory",
        PeerSystem("lm-resiliency", memory, lambda f, e, _: _LmResiliency(f, e, disk=False), *resilient),
    )
    yield "ckpt", PeerSystem("Lightning .ckpt", storage, lambda f, e, _: LightningSaving(f, e))
    beside = PeerSystem("Lightning .ckpt, async", storage, lambda f, e, _: LightningSaving(f, e), beside=True)
    yield "ckpt-async", beside
    yield "dcp", PeerSystem("torch DCP, sync", storage, lambda f, e, _: _Dcp(f, e, "sync"))
    yield "dcp-async", PeerSystem("torch DCP, async", storage, lambda f, e, _: _Dcp(f, e, "async"))
    yield "dcp-process", PeerSystem("torch DCP, process", storage, lambda f, e, _: _Dcp(f, e, "process"))
    yield "dlrover-disk", PeerSystem("DLRover", storage, lambda f, e, n: _Dlrover(f, e, n, disk=True), *dlrover)
    yield "nvrx-async", PeerSystem("NVRx, async", storage, lambda f, e, _: _NvrxAsync(f, every_n_steps=e), *nvrx)
    yield (
        "lm-resiliency-disk",
        PeerSystem("lm-resiliency", storage, lambda f, e, _: _LmResiliency(f, e, disk=True), *resilient),
    )
    for place in (memory, storage):
        for policy in ("sparse", "dense", "differential", "partial", "selective"):
            yield f"{policy}-{place}", _own(policy, place)


SYSTEMS = dict(_systems())
"""All of them, by the name on the command line."""


def die_with_parent() -> None:
    """Let the kernel kill this process at its parent's end, by whatever cause."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def forget(name: str) -> None:
    """Remove DLRover's shared memory and sockets of the run `name`."""
    for place in (Path("/dev/shm"), Path("/tmp/ckpt_sock")):  # noqa: S108  # its places
        for path in place.glob(f"*{name}*"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
