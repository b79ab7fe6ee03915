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

import torch
from door import Fit
from lightning.pytorch import Callback, LightningModule, Trainer
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
from lightning_moe_ckpt.testing import Attempt

Library = Literal["litgpt_moe", "litgpt_dense", "mixtral", "switch", "gpt_oss", "deepseek_v3", "gpt2"]
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
    def make_module(self, life: Attempt) -> Module:
        return ThirdPartyModule(self, life)

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        callbacks: list[Callback] = []
        if self.bar != "none":
            callbacks.append(RichProgressBar() if self.bar == "rich" else TQDMProgressBar())
        if self.library == "deepseek_v3":
            callbacks.append(Correction())
        return [*callbacks, *_companions(monitored=self.checkpointing is not None)] if self.companions else callbacks

    @override
    def trainer_options(self, life: Attempt) -> dict[str, Any]:
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
    def returned(self, life: Attempt, trainer: Trainer) -> dict[str, Any]:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for timer in [callback for callback in callbacks if isinstance(callback, Timer)]:
            before = timer.time_elapsed() - ((timer.end_time() or 0.0) - (timer.start_time() or 0.0))
            (life.workdir / f"attempt{life.index}.timer").write_text(str(before))  # differs from run to run
        gates = [each for _, each in _gates(trainer.lightning_module)]
        return {"corrections": [gate.e_score_correction_bias.tolist() for gate in gates]} if gates else {}


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
    makers = {"mixtral": _mixtral, "switch": _switch, "gpt2": _gpt2, "gpt_oss": _gpt_oss, "deepseek_v3": _deepseek_v3}
    model = makers[library]()
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


_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": MODEL_DIM,
    "intermediate_size": 2 * MODEL_DIM,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": SEQUENCE,
    "attention_dropout": 0.1,
}


def _gpt_oss() -> Any:
    """Experts with stacked biases, whose gate and up projections are interleaved."""
    from transformers import GptOssConfig, GptOssForCausalLM

    rope = {"rope_type": "default", "rope_theta": 1e4}
    options: dict[str, Any] = {**_DECODER, "num_local_experts": NUM_EXPERTS, "head_dim": 8, "rope_parameters": rope}
    return GptOssForCausalLM(GptOssConfig(**options))


def _deepseek_v3() -> Any:
    """A dense layer, then one with a shared expert, groups of experts, and a bias that no gradient moves."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    experts = {"n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1, "moe_intermediate_size": MODEL_DIM}
    groups = {"n_group": 2, "topk_group": 2, "first_k_dense_replace": 1}
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    options: dict[str, Any] = {**_DECODER, "num_key_value_heads": 2, **experts, **groups, **heads}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**options))


def _gates(module: nn.Module) -> list[tuple[str, Any]]:
    """Routers with a correction bias, by name."""
    return [(name, each) for name, each in module.named_modules() if hasattr(each, "e_score_correction_bias")]


class Correction(Callback):
    """Moves the correction bias of every router by the load of the batch, as DeepSeek does; transformers leave it alone.

    Source: DeepSeek-V3 (2024), Sec. 2.1.2.
    """

    SPEED = 0.02

    def __init__(self) -> None:
        self._loads: dict[str, Tensor] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, gate in _gates(pl_module):
            gate.register_forward_hook(partial(self._count, name))

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        for name, gate in _gates(pl_module):
            load_E = trainer.strategy.reduce(self._loads.pop(name), reduce_op="sum")
            assert isinstance(load_E, Tensor)
            gate.e_score_correction_bias += self.SPEED * torch.sign(load_E.float().mean() - load_E)

    def _count(self, name: str, gate: Any, _args: object, out: tuple[Tensor, ...]) -> None:
        if gate.training:  # of a forward that is repeated, the same again
            chosen = next(tensor for tensor in out if tensor.dtype == torch.int64)
            self._loads[name] = torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS)


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

    def __init__(self, setup: ThirdParty, life: Attempt) -> None:
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


def train_in_terminal(setup: ThirdParty, life: Attempt) -> Mapping[str, Any]:
    """Run `setup` in this process, before a terminal if it has a progress bar."""
    path = life.workdir / f"attempt{life.index}.terminal"
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
