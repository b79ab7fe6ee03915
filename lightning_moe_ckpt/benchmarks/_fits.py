"""Trainings that are measured, their common parts, and processes that run in turns.

The model is a small GPT with experts on a stream of random tokens. Learning does not matter. A realistic state does: a
mix of a few large expert tensors and many small dense ones, clipped gradients, a logged metric and a learning rate
schedule, since each has its share in the journal.

Two measurements one after the other meet different loads on a shared machine. In turns of a few seconds both meet nearly the same
load, and neither has to start anew for every turn.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import Self

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.process import compute_alone
from lightning_moe_ckpt.storage import Backend, StorageCall, WrappedBackend
from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.tiers import shared_directory
from lightning_moe_ckpt.tiers._tier_worker import SkipCounter

T = TypeVar("T")

# Shape suffixes: N crops in total, B crops of a batch, T tokens of a crop, D model dim, H heads, V vocabulary.


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Model size; the defaults have 4.6 million parameters, nine in ten in experts."""

    num_blocks: int = 4
    """Transformer blocks, each with one layer of experts."""
    model_dim: int = 128
    """Width of the residual stream, 32 for each attention head."""
    num_experts: int = 16
    """Experts per block."""
    expert_dim: int = 256
    """Hidden width of one expert."""
    vocabulary: int = 256
    """Different tokens."""
    context: int = 64
    """Tokens of a crop."""
    batch_size: int = 16
    """Crops of a batch."""
    capacity_factor: float = 0.0
    """Room per expert relative to an even load; 0 drops nothing."""
    balance: float = 0.01
    """Weight of the experts' balancing loss."""
    dropout: float = 0.0
    """Share of the embedding's elements that are dropped."""

    def num_params(self) -> int:
        """Return the number of parameters; the model is not built."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in BenchModel(self).parameters())


class _Block(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        dim = size.model_dim
        self.num_heads = max(1, dim // 32)
        self.norm_attention, self.norm_moe = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.moe = MoELayer(dim, size.expert_dim, size.num_experts, top_k=2, capacity_factor=size.capacity_factor)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self._attend(self.norm_attention(x_BTD))
        out_BTD: Tensor = x_BTD + self.moe(self.norm_moe(x_BTD))
        return out_BTD

    def _attend(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BTD).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y_BHTD = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y_BTD: Tensor = self.out(y_BHTD.transpose(1, 2).flatten(2))
        return y_BTD


class BenchModel(LightningModule):
    """Predict the next token."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        self.build()

    def build(self) -> None:
        """Make the layers."""
        size = self.size
        self.embed = nn.Embedding(size.vocabulary, size.model_dim)
        self.position = nn.Embedding(size.context, size.model_dim)
        self.blocks = self.blocks_of(size)
        self.head = nn.Linear(size.model_dim, size.vocabulary)

    @staticmethod
    def blocks_of(size: ModelSize) -> nn.Sequential:
        """Return new blocks with this rank's share of the experts."""
        return nn.Sequential(*(_Block(size) for _ in range(size.num_blocks)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return cross-entropy plus the experts' balancing loss."""
        (tokens_BT,) = batch
        loss = self.cross_entropy(tokens_BT)
        self.log("loss", loss)
        balance = [layer.l_aux for layer in self.moe_layers() if layer.l_aux is not None]
        return loss + self.size.balance * torch.stack(balance).sum()

    def cross_entropy(self, tokens_BT: Tensor) -> Tensor:
        """Return the mean over every token but the first, in nats."""
        x_BTD = self.embed(tokens_BT[:, :-1]) + self.position.weight[: tokens_BT.shape[1] - 1]
        x_BTD = nn.functional.dropout(x_BTD, self.size.dropout, self.training)
        logits_BTV = self.head(self.blocks(x_BTD))
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())

    def moe_layers(self) -> list[MoELayer]:
        """Return the layers of experts, first block first."""
        return [module for module in self.modules() if isinstance(module, MoELayer)]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW, 12 bytes per parameter with its weights, under a warm-up."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def random_tokens(size: ModelSize, num_batches: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return batches for `num_batches` steps; each crop is a token longer than the context, the last token to predict."""
    generator = torch.Generator().manual_seed(0)
    shape_NT = (num_batches * size.batch_size, size.context + 1)
    tokens_NT = torch.randint(size.vocabulary, shape_NT, generator=generator)
    return DataLoader(TensorDataset(tokens_NT), batch_size=size.batch_size, shuffle=True)


# -- trainings

_ADVICE = (
    r".*does not have many workers.*",
    r".*assuming the intent is to (save|load) in a single process.*",
    r".*your dataloader is not resumable.*",
    r".*isinstance\(treespec, LeafSpec\).*",
)


def own_memory(folder: str | Path, *, lost: bool) -> None:
    """Make `folder`, on a tmpfs, this process's shared memory, as its node's; empty if the memory was `lost`."""
    if lost:
        shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir(parents=True, exist_ok=True)
    os.environ["MOE_CKPT_SHARED_MEMORY"] = str(folder)


def bench_trainer(**options: Any) -> Trainer:
    """Return a Trainer without loggers and bars, with clipped gradients; `options` come on top."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(**{"devices": 1, "strategy": MoEStrategy(), "gradient_clip_val": 1.0, **quiet, **options})


@contextmanager
def one_thread() -> Iterator[None]:
    """Give torch one thread: copies and digests run beside training, as they do where training has a device."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence lines about devices and advice on loaders and on other checkpoints: they would bury the table."""
    loud = ("lightning.pytorch", "lightning.fabric")
    with ExitStack() as stack, warnings.catch_warnings():
        for name in loud:
            stack.enter_context(at_level(name, logging.WARNING))
        for message in _ADVICE:
            warnings.filterwarnings("ignore", message=message)
        yield


def patient_storage() -> AbstractContextManager[None]:
    """Silence warnings of storage slower than training, where the benchmark itself slows storage down."""
    return at_level(SkipCounter.__module__, logging.CRITICAL)


@contextmanager
def at_level(name: str, level: int) -> Iterator[None]:
    """Give the logger `name` another level."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def bench_folders(parent: Path | None = None) -> Iterator[tuple[Path, Path]]:
    """Yield a folder for checkpoints and one on the tmpfs, both gone afterwards, whatever killed processes left there."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="moe-ckpt-bench-", dir=parent) as folder,
        tempfile.TemporaryDirectory(prefix="moe-ckpt-bench-", dir=shared_directory()) as memory,
    ):
        yield Path(folder), Path(memory)


class StorageGate:
    """Let large writes wait while it is closed, as on storage that hangs: memory alone works.

    Pass `backend` to `storage.wrapping_backends`. Open it before a run ends: that waits until the last step is stored.
    """

    LARGE_NBYTES = 2**14
    """Writes of fewer bytes go on: training does not notice them, and a run that cannot write its log stops."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.open()

    def open(self) -> None:
        """Let everything pass from now on."""
        self._open.set()

    def close(self) -> None:
        """Hold large writes that begin from now on."""
        self._open.clear()

    def backend(self, backend: Backend) -> WrappedBackend:
        """Return `backend` behind this gate."""
        return WrappedBackend(backend, self._pass)

    def _pass(self, call: StorageCall, operation: Callable[[], T]) -> T:
        if not call.writes or call.nbytes < self.LARGE_NBYTES:
            return operation()
        self._open.wait()
        return self._write(operation)

    def _write(self, operation: Callable[[], T]) -> T:
        return operation()


Result = TypeVar("Result")
HandOver = Callable[[Result], None]
"""Ends a turn with its result and returns when the next one begins; raises `EOFError` if there is none."""

_FORK = multiprocessing.get_context("fork")
_PATIENCE = timedelta(seconds=60)
"""Time for a process to leave by itself and remove its shared memory."""


class TurnFailed(RuntimeError):
    """The work raised, ended early or was too late; the message holds its traceback."""


class TurnTaker(Generic[Result]):
    """A process that does `work` in turns, on one thread. It is forked at once, with this process's objects of that moment.

    Args:
        work: takes a function to call at every turn's end.
        timeout: limit for one turn.
    """

    def __init__(self, work: Callable[[HandOver[Result]], None], timeout: timedelta = timedelta(minutes=10)) -> None:
        self._timeout, self._patience = timeout, _PATIENCE
        self._pipe, child = _FORK.Pipe()
        self._process = _FORK.Process(target=_serve, args=(work, child, self._pipe))
        self._process.start()
        child.close()  # else the end of the process would not be seen as the end of the pipe

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Give no more turns: wait for the process to clean up, then end it.

        The last of several takers goes first: its process has inherited the pipes of the others, which end when nobody holds them.
        """
        self._pipe.close()
        self._process.join(self._patience.total_seconds())
        self.kill()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid or 0

    def kill(self) -> None:
        """End the process by SIGKILL, and wait for its end."""
        self._process.kill()
        self._process.join()

    def take(self) -> Result:
        """Let it have one turn. Raises `CheckpointError` if the work did; `TurnFailed` if it raised something else, ended early or
        was too late.
        """
        self.begin()
        return self.end()

    def begin(self) -> None:
        """Begin a turn; `end` waits for its end. Several processes may have turns at once."""
        with suppress(BrokenPipeError):  # `end` finds the same
            self._pipe.send_bytes(b"go")

    def end(self) -> Result:
        """Wait for the turn's end and return its result; raises as `take` does."""
        try:
            if not self._pipe.poll(self._timeout.total_seconds()):
                self._patience = timedelta(0)
                raise TurnFailed(f"a turn is not over after {self._timeout}")
            error, result = self._pipe.recv()
        except (EOFError, ConnectionResetError) as ended:
            raise TurnFailed("the process ended before its turn was over") from ended
        if error is not None:
            raise error
        return cast("Result", result)


def _serve(work: Callable[[HandOver[Result]], None], pipe: Connection, other_end: Connection) -> None:
    compute_alone()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    other_end.close()  # inherited: while it is open here, the parent closing its own goes unseen

    def hand_over(result: Result) -> None:
        pipe.send((None, result))
        pipe.recv_bytes()

    try:
        with suppress(EOFError, BrokenPipeError):  # no more turns; the parent sees our end if it expected one
            pipe.recv_bytes()
            work(hand_over)
    except CheckpointError as error:
        pipe.send((CheckpointError(str(error)), None))
    except BaseException:  # noqa: BLE001  # process entry: the parent reports it
        pipe.send((TurnFailed(traceback.format_exc()), None))
