"""What users' modules do in hooks, one mixin for each; a drawn run has a few of them."""

from __future__ import annotations

import random
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from campaign._data import VOCABULARY

Hook = Literal[
    "skips_rest",
    "no_loss",
    "extra_state",
    "stops",
    "transfers",
    "draws",
    "modes",
    "counts",
    "odd_buffers",
    "edits",
    "clears",
    "steps",
    "keeps_gradients",
    "fades_gradients",
    "keeps_some",
    "reads_state",
    "scales_gradients",
    "clamps",
    "logs",
    "reseeds",
    "renorms",
    "after_step",
    "freezes",
    "unfreezes",
    "edits_frozen",
    "counts_forwards",
    "replaces",
    "accumulates",
]
"""See `HOOKS`."""


class SkipsRest(LightningModule):
    """Leaves out the rest of an epoch."""

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class NoLoss(LightningModule):
    """Has nothing to learn from some batches."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if random.random() < 0.2 else super().training_step(batch, batch_idx)


class Stops(LightningModule):
    """Ends training in the middle of an epoch."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.should_stop |= self.global_step >= 7
        return super().training_step(batch, batch_idx)


class Reseeds(LightningModule):
    """Draws numbers aside, and seeds anew."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.rand(2)
        if batch_idx % 2:
            torch.manual_seed(self.global_step + 100 * self.global_rank)
        return {"loss": super().training_step(batch, batch_idx), "more": [batch_idx]}


class Transfers(LightningModule):
    """Augments whole batches, before and after they are moved to the device."""

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        random.random()
        return batch

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not (self.trainer.training and isinstance(batch, list)):
            return batch
        return [(batch[0] + int(torch.randint(3, ()))) % VOCABULARY, batch[1]]


class Draws(LightningModule):
    """Draws numbers in hooks of every kind."""

    @override
    def on_train_start(self) -> None:
        torch.rand(1)

    @override
    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        random.random()

    @override
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        np.random.rand()  # noqa: NPY002  # the legacy generator, as users do

    @override
    def on_validation_epoch_end(self) -> None:
        torch.rand(2)


class Modes(LightningModule):
    """Sets the mode of norms, a rate of dropout and a temperature by the epoch."""

    @override
    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.train(self.current_epoch % 2 == 0)
            elif isinstance(module, nn.Dropout):
                module.p = 0.1 + 0.1 * (self.current_epoch % 3)
        self.model.temperature = 1.0 + self.current_epoch  # type: ignore[union-attr]

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Any = super().training_step(batch, batch_idx)
        return loss * getattr(self.model, "temperature", 1.0)


class Extra(LightningModule):
    """Has a part of another kind, which adds to the loss."""

    extra: Any

    def make(self) -> nn.Module:
        raise NotImplementedError

    @override
    def configure_model(self) -> None:
        super().configure_model()
        if "extra" not in self._modules:
            self.extra = self.make()

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Any = super().training_step(batch, batch_idx)
        return loss + self.extra()


class Counter(nn.Module):
    """Counts its calls in a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(3)), 0

    @override
    def forward(self) -> Tensor:
        self.calls += self.training
        return 0.01 * self.weight.square().sum() * (1 + self.calls % 3)


class Counts(Extra):
    @override
    def make(self) -> nn.Module:
        return Counter()


class CountsForwards(LightningModule):
    """Counts in a buffer how often it is asked, in training, in validation and before training."""

    num_forwards: Tensor

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_forwards += 1
        return super().training_step(batch, batch_idx)

    @override
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.num_forwards += 1
        return super().validation_step(batch, batch_idx, dataloader_idx)


class OddBuffers(nn.Module):
    """Tensors of no, of one and of shared elements; buffers of many types, one of which grows at first."""

    turn: Tensor
    wide: Tensor
    flags: Tensor
    newest: Tensor

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(4, 4)
        self.scalar, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 4))
        self.upper, self.lower = nn.Parameter(both[:2]), nn.Parameter(both[2:])
        self.register_buffer("turn", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("wide", torch.zeros(1).expand(3))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("none", None)
        self.register_buffer("newest", torch.zeros(0), persistent=False)

    @override
    def forward(self) -> Tensor:
        if self.training:
            self.turn *= 1j
            self.wide = self.wide + 1
            self.flags[int(self.wide[0]) % 3] ^= True
            self.newest = torch.cat([self.newest, self.scalar.detach().float()[None]])[-3:]
        factor = 1 + 0.1 * self.turn.real.sum() + 0.1 * self.flags.sum() + 0.1 * self.newest.sum()
        return 0.01 * factor * (self.scalar * self.upper.sum() + self.lower.square().sum()).float()


class HasOddBuffers(Extra):
    @override
    def make(self) -> nn.Module:
        return OddBuffers()


class Edits(LightningModule):
    """Edits weights between epochs, so that no version counter sees it."""

    @override
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        _first_matrix(self).data.mul_(0.9)


class Clears(LightningModule):
    """Lets the optimizer forget everything between epochs."""

    @override
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.optimizers().optimizer.state.clear()  # type: ignore[union-attr]


class Steps(LightningModule):
    """Sets options of the optimizer before each step."""

    @override
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.01 * (self.global_step % 3)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class AfterStep(LightningModule):
    """Has hooks of the optimizer: one sets the decay, one bounds a weight, takes the decay back and clears gradients behind the step."""

    @override
    def configure_optimizers(self) -> Any:
        found: Any = super().configure_optimizers()
        optimizer = (
            found["optimizer"] if isinstance(found, dict) else found[0][0] if isinstance(found, tuple) else found
        )
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._behind_step)
        return found

    @staticmethod
    def _before_step(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.02

    @torch.no_grad()
    def _behind_step(self, optimizer: Any, *_: Any) -> None:
        if self.global_step % 3 == 1:
            _first_matrix(self).clamp_(-0.1, 0.1)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
            for param in group["params"]:
                if param.grad is not None and self.global_step % 3 == 2:
                    param.grad.zero_()


class KeepsGradients(LightningModule):
    """Sets gradients to zero, which others set to `None`."""

    @override
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class FadesGradients(LightningModule):
    """Adds each gradient to nine tenths of the last one."""

    @override
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(0.9)


class KeepsSome(LightningModule):
    """Adds up the gradients of vectors, and from the fifth step on for two steps those of a matrix."""

    @override
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        late = _first_matrix(self) if self.global_step % 6 > 4 else None
        for param in self.parameters():
            if param.ndim != 1 and param is not late:
                param.grad = None


class ReadsState(LightningModule):
    """Reads what the optimizer keeps of a matrix, once it keeps anything."""

    @override
    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        matrix = _first_matrix(self)
        if matrix.requires_grad and any(optimizer.state.values()) and not optimizer.state[matrix]:
            raise KeyError("state of a matrix that trains")


class ScalesGradients(LightningModule):
    """Edits the gradient of each parameter, by how long it is."""

    @override
    def on_after_backward(self) -> None:
        super().on_after_backward()
        for param in self.parameters():
            if param.grad is not None:
                length = float(param.grad.float().norm())
                param.grad.mul_(0.5 if not length < float("inf") else 0.5 + 0.25 / (1 + length))


class Clamps(LightningModule):
    """Edits weights after each batch, unseen."""

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        _first_matrix(self).data.clamp_(-0.3, 0.3)


class Renorms(LightningModule):
    """Changes weights in place in the forward pass, as `nn.Embedding(max_norm=...)` does."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            _first_matrix(self).mul_(0.99)
        return super().training_step(batch, batch_idx)


class Logs(LightningModule):
    """Gives rows to the logger itself."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.logger is not None:
            self.logger.log_metrics({"direct": float(batch_idx)}, step=self.global_step)
        return super().training_step(batch, batch_idx)


def _first_matrix(module: LightningModule) -> Tensor:
    return next(param for name, param in module.named_parameters() if param.ndim == 2 and "expert" not in name)


class HasExtraState(LightningModule):
    """Scales its loss by what it has seen, which is in no buffer: layers in fp8 do so."""

    _largest = torch.zeros(())

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        loss: Any = found["loss"] if isinstance(found, dict) else found
        if loss is None:
            return found
        scaled = loss * (1 + self._largest)
        self._largest = torch.maximum(self._largest * 0.9, loss.detach().cpu())
        return {**found, "loss": scaled} if isinstance(found, dict) else scaled

    @override
    def get_extra_state(self) -> Tensor:
        return self._largest

    @override
    def set_extra_state(self, state: Tensor) -> None:
        self._largest = state


class Freezes(LightningModule):
    """Has a base that does not train: every second parameter."""

    def _base(self) -> list[nn.Parameter]:
        return list(self.parameters())[::2]

    @override
    def configure_model(self) -> None:
        fresh = self.model is None
        super().configure_model()
        for param in self._base() if fresh else ():
            param.requires_grad_(False)


class Unfreezes(Freezes):
    """Trains a part of the base from the second epoch on."""

    @override
    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        for param in self._base()[1::2]:
            param.requires_grad_(self.current_epoch > 0)


class EditsFrozen(Freezes):
    """Follows what trains with a part of the base, from the fourth step on, and changes another once through `.data`."""

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        first, *_, last = self._base()
        trained = [p.mean() for name, p in self.named_parameters() if p.requires_grad and "expert" not in name]
        with torch.no_grad():
            if self.global_step > 3:
                first.mul_(0.99).add_(torch.stack(trained).mean().to(first.dtype), alpha=0.01)
        if self.global_step == 6:
            last.data.mul_(0.9)


class Replaces(LightningModule):
    """Puts another parameter in the place of a matrix as the second epoch begins, in its modules and the optimizer."""

    @override
    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch != 1:
            return
        old = _first_matrix(self)
        new = nn.Parameter(0.9 * old.detach(), requires_grad=old.requires_grad)
        optimizer: Any = self.optimizers()
        optimizer.optimizer.state.pop(old, None)
        for group in optimizer.optimizer.param_groups:
            group["params"] = [new if param is old else param for param in group["params"]]
        for owner in self.modules():
            for name, param in owner.named_parameters(recurse=False, remove_duplicate=False):
                if param is old:
                    setattr(owner, name, new)


class Accumulates(LightningModule):
    """Accumulates two batches from a step within an epoch on, and one again later: some steps begin with gradients."""

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.global_step in (5, 11):
            self.trainer.accumulate_grad_batches = 2 if self.global_step == 5 else 1


HOOKS: dict[Hook, type[LightningModule]] = {
    "skips_rest": SkipsRest,
    "stops": Stops,
    "transfers": Transfers,
    "draws": Draws,
    "modes": Modes,
    "counts": Counts,
    "odd_buffers": HasOddBuffers,
    "edits": Edits,
    "clears": Clears,
    "steps": Steps,
    "keeps_gradients": KeepsGradients,
    "fades_gradients": FadesGradients,
    "keeps_some": KeepsSome,
    "reads_state": ReadsState,
    "scales_gradients": ScalesGradients,
    "clamps": Clamps,
    "logs": Logs,
    "reseeds": Reseeds,
    "no_loss": NoLoss,
    "extra_state": HasExtraState,
    "renorms": Renorms,
    "after_step": AfterStep,
    "freezes": Freezes,
    "unfreezes": Unfreezes,
    "edits_frozen": EditsFrozen,
    "counts_forwards": CountsForwards,
    "replaces": Replaces,
    "accumulates": Accumulates,
}
LATER: tuple[Hook, ...] = (
    *("renorms", "after_step", "fades_gradients", "keeps_some", "reads_state", "freezes", "unfreezes", "edits_frozen"),
    *("counts_forwards", "replaces", "accumulates"),
)
"""Drawn beside the others, in this order, so that a number means the same run but for them."""
EDITS: frozenset[Hook] = frozenset({"edits"})
"""What a validation between repeated steps may see too early."""


def with_hooks(base: type[LightningModule], hooks: tuple[Hook, ...]) -> Any:
    """A class that does these things, innermost first."""
    for hook, mixin in HOOKS.items():
        if hook in hooks:
            base = type(f"{mixin.__name__}{base.__name__}", (mixin, base), {})
    return base
