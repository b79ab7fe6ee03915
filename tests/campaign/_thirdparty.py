"""Models and callbacks that others wrote, as they are, in a run that is described like every other campaign."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
import termios
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    RichModelSummary,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from typing_extensions import override

from campaign._data import SEQUENCE, VOCABULARY
from campaign._models import MODEL_DIM, NUM_EXPERTS, tiny_mixtral
from campaign._training import Module, Setup, train
from lightning_moe_ckpt.testing._lives import Fit, Life

Library = Literal["litgpt_moe", "litgpt_dense", "mixtral", "switch", "gpt2"]
Bar = Literal["none", "tqdm", "rich"]


@dataclass(frozen=True, kw_only=True)
class ThirdParty(Setup):
    """A run of somebody else's model, beside somebody else's callbacks."""

    library: Library
    recompute: bool = False
    """Whether activations are checkpointed, by the library's own switch."""
    companions: bool = False
    """Whether Lightning's own callbacks and loggers take part."""
    bar: Bar = "none"

    @property
    @override
    def fit(self) -> Fit:
        return partial(train_in_terminal, self)

    @override
    def make_module(self, life: Life) -> Module:
        return ThirdPartyModule(self, life)

    @override
    def callbacks(self, life: Life) -> Sequence[Callback]:
        callbacks: list[Callback] = []
        if self.bar != "none":
            callbacks.append(RichProgressBar() if self.bar == "rich" else TQDMProgressBar())
        return [*callbacks, *_companions(monitored=self.checkpointing is not None)] if self.companions else callbacks

    @override
    def trainer_options(self, life: Life) -> dict[str, Any]:
        folder, version = str(life.workdir), "run"
        loggers = [CSVLogger(folder, "csv", version), TensorBoardLogger(folder, "tensorboard", version)]
        return {
            **super().trainer_options(life),
            "accumulate_grad_batches": 1,
            "logger": loggers if self.companions else False,
            "log_every_n_steps": 1,
            "enable_progress_bar": self.bar != "none",
            "enable_model_summary": self.companions,
        }

    @override
    def returned(self, life: Life, trainer: Trainer) -> dict[str, Any]:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for timer in [each for each in callbacks if isinstance(each, Timer)]:
            before = timer.time_elapsed() - ((timer.end_time() or 0.0) - (timer.start_time() or 0.0))
            (life.workdir / f"life{life.index}.timer").write_text(str(before))  # differs from run to run
        return {}


class _Logits(nn.Module):
    """A language model as the campaigns call it: logits, and no balancing loss."""

    def __init__(self, model: nn.Module, logits: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self._logits = model, logits

    @override
    def forward(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        logits_BSV = self._logits(self.model, tokens_BS)
        return logits_BSV, logits_BSV.new_zeros(())


def build(library: Library, *, recompute: bool) -> nn.Module:
    """A tiny model with random weights."""
    if library.startswith("litgpt"):
        return _Logits(_litgpt(moe=library == "litgpt_moe"), lambda model, tokens_BS: model(tokens_BS))
    model = {"mixtral": _mixtral, "switch": _switch, "gpt2": _gpt2}[library]()
    if recompute:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the name that users know is about to go
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
    if library == "switch":
        return _Logits(model, lambda model, t: model(input_ids=t, decoder_input_ids=t.flip(1), use_cache=False).logits)
    return _Logits(model, lambda model, tokens_BS: model(input_ids=tokens_BS, use_cache=False).logits)


def _litgpt(*, moe: bool) -> Any:
    from litgpt.config import Config
    from litgpt.model import GPT

    shape = {"n_layer": 2, "n_embd": MODEL_DIM, "n_head": 2, "block_size": SEQUENCE, "intermediate_size": 2 * MODEL_DIM}
    words = {"vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY}
    if not moe:
        return GPT(Config(**shape, **words))
    experts = {"mlp_class_name": "LLaMAMoE", "n_expert": NUM_EXPERTS, "n_expert_per_token": 2}
    return GPT(Config(**shape, **words, **experts, norm_class_name="RMSNorm", bias=False))


def _mixtral() -> Any:
    return tiny_mixtral(attention_dropout=0.1, router_jitter_noise=0.1)


def _switch() -> Any:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        vocab_size=VOCABULARY,
        d_model=MODEL_DIM,
        d_kv=8,
        d_ff=2 * MODEL_DIM,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_heads=2,
        num_experts=NUM_EXPERTS,
        expert_capacity=16,
        router_jitter_noise=0.1,
        relative_attention_num_buckets=4,
    )
    return SwitchTransformersForConditionalGeneration(config)


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        n_embd=MODEL_DIM,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


class ThirdPartyModule(Module):
    """The campaigns' module around the library's model."""

    def __init__(self, setup: ThirdParty, life: Life) -> None:
        super().__init__(setup, life)
        self._third_party = setup

    @override
    def configure_model(self) -> None:
        if self.model is None:
            self.model = build(self._third_party.library, recompute=self._third_party.recompute)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self._third_party.companions:
            self.log("loss", loss, prog_bar=True)
        return loss


def train_in_terminal(setup: ThirdParty, life: Life) -> Mapping[str, Any]:
    """Run `setup` in this process, before a terminal if it has a progress bar."""
    path = life.workdir / f"life{life.index}.terminal"
    with _terminal(path) if setup.bar != "none" else contextlib.nullcontext():
        return train(setup, life)


def _companions(*, monitored: bool) -> list[Callback]:
    from lightning_moe_ckpt.callbacks import ExpertLoadMonitor

    return [
        RichModelSummary(max_depth=3),
        DeviceStatsMonitor(cpu_stats=True),
        LearningRateMonitor("step", log_momentum=True),
        GradientAccumulationScheduler({0: 2, 1: 1}),
        Timer({"hours": 1}, interval="step"),
        ThroughputMonitor(batch_size_fn=len_of, length_fn=lengths_of, window_size=2),
        *([ExpertLoadMonitor(every_n_steps=1)] if monitored else []),
    ]


def len_of(batch: list[Tensor]) -> int:
    """Sequences of a batch."""
    return len(batch[0])


def lengths_of(batch: list[Tensor]) -> int:
    """Tokens of a batch."""
    return batch[0].numel()


@contextlib.contextmanager
def _terminal(path: Path) -> Iterator[None]:
    """Let standard output and error be a wide terminal, and write to `path` what it was sent."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 400, 0, 0))
    kept = os.dup(1), os.dup(2)
    reader = threading.Thread(target=_copy, args=(ours, path), daemon=True)
    reader.start()
    for descriptor in (1, 2):
        os.dup2(theirs, descriptor)
    os.close(theirs)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, was in zip((1, 2), kept, strict=True):
            os.dup2(was, descriptor)  # the last end of the terminal on our side closes, which ends the reader
            os.close(was)
        reader.join(10)


def _copy(descriptor: int, path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):  # a terminal without writers is an error
        while chunk := os.read(descriptor, 2**16):
            file.write(chunk)
