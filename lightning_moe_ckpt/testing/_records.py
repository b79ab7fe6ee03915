"""Record a line per batch of an attempt while training runs, and the whole training state at the end.

Everything is compared by bits: floats travel as hex, tensors are compared with `torch.equal` after dtype and shape.
Lines are appended with one `write` each, so that the lines of a killed process stay and the lines of several threads do not mix.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.operators import show_shards
from lightning_moe_ckpt.parallel import stepped_of

Record = dict[str, Any]


class JsonLines:
    """File of JSON objects, one a line, open for appending. If a dying machine left a torn line, the constructor ends that line."""

    def __init__(self, path: str | Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if (nbytes := os.fstat(self._file).st_size) and os.pread(self._file, 1, nbytes - 1) != b"\n":
            os.write(self._file, b"\n")

    def write(self, line: Record, *, sync: bool = False) -> None:
        """Append a line, which outlives a SIGKILL; with `sync` the line is on the medium on return."""
        os.write(self._file, (json.dumps(line) + "\n").encode())
        if sync:
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_lines(path: str | Path) -> list[Record]:
    """Return a file's lines, none if there is no file; a torn line is passed over."""
    lines = list[Record]()
    text = Path(path).read_text(encoding="utf-8", errors="replace") if Path(path).exists() else ""
    for line in text.splitlines():
        with suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


class Recorder(Checkpoint):
    """Write one line per batch and, at the end of training, this rank's state. Changes nothing, draws no RNG.

    A `Checkpoint`, so that Lightning runs it after the callbacks whose effects it records.
    """

    def __init__(self, records: Path, end: Path) -> None:
        self._end = end
        self.write = JsonLines(records).write
        self._batch = ""
        self._ended = False

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *args: object) -> None:
        # Before the step: the optimizer may not have stepped when this attempt ends, but the data was seen.
        self._batch = digest(batch)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rates = [float(group["lr"]).hex() for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self._line(trainer, "train", batch_idx, loss=bits(outputs), data=self._batch, lr=rates)

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not trainer.sanity_checking:
            kind = f"validation {dataloader_idx}" if dataloader_idx else "validation"
            self._line(trainer, kind, batch_idx, loss=bits(outputs), data=digest(batch))

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = {name: bits(value) for name, value in sorted(trainer.callback_metrics.items())}
        self._line(trainer, "epoch", 0, metrics=metrics)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(capture_end(trainer, pl_module), self._end)
        self._ended = True

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._ended:  # an attempt that found the run finished: nothing was trained, no number will be drawn
            end = capture_end(trainer, pl_module)
            torch.save({key: value for key, value in end.items() if not key.startswith("rng/")}, self._end)

    def _line(self, trainer: Trainer, kind: str, batch_idx: int, **values: Any) -> None:
        where = {"kind": kind, "epoch": trainer.current_epoch, "batch": batch_idx, "step": trainer.global_step}
        where["seen"] = trainer.fit_loop.epoch_loop.batch_progress.total.ready  # validation may come twice in a step
        self.write({**where, **values})


def bits(value: Any) -> str | None:
    """Return the exact bits of a scalar, or of a step's loss, as text; `None` stays `None`."""
    if isinstance(value, Mapping):
        value = value.get("loss")  # a step that returns `None` leaves an empty one
    if value is None:
        return None
    number = value.detach().cpu() if isinstance(value, Tensor) else torch.tensor(value)
    return f"{str(number.dtype).removeprefix('torch.')}:{float(number.double()).hex()}"


def digest(batch: Any) -> str:
    """Return xxh3-128 over every tensor of a batch, so that data order and random augmentation are both seen."""
    state = xxhash.xxh3_128()
    for leaf in _leaves(batch):
        state.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
        state.update(_bytes(leaf).numpy().tobytes())
    return state.hexdigest()


def _leaves(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for key in sorted(batch):
            yield from _leaves(batch[key])
    elif isinstance(batch, (list, tuple)):
        for item in batch:
            yield from _leaves(item)
    elif batch is None:  # of a combined loader that has ended
        yield torch.empty(0)
    elif isinstance(batch, str):
        yield torch.tensor(list(batch.encode()), dtype=torch.uint8)
    elif hasattr(batch, "__dict__"):  # a data class, or a batch class of the user's own
        yield from _leaves(vars(batch))
    else:
        yield torch.tensor(batch)


def capture_end(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """Return all state to be reproduced by a resumed run: keys are paths, values tensors or plain scalars.

    Of a DTensor the shard of this rank, with the place that it has in the whole; of sharded state this rank's pieces.
    """
    show_shards(pl_module)
    names = {id(stepped_of(parameter)): name for name, parameter in pl_module.named_parameters()}
    end: dict[str, Any] = {}  # on the host, so that whoever reads it needs no device
    for name, parameter in pl_module.named_parameters():
        end.update(_flat(f"param/{name}", parameter.detach().cpu().clone()))
        end[f"requires_grad/{name}"] = parameter.requires_grad
    end.update({f"buffer/{name}": buffer.detach().cpu().clone() for name, buffer in pl_module.named_buffers()})
    for index, optimizer in enumerate(trainer.optimizers):
        end.update(_flat(f"optimizer/{index}", _optimizer_state(optimizer, names)))
    for index, config in enumerate(trainer.lr_scheduler_configs):
        end.update(_flat(f"scheduler/{index}", config.scheduler.state_dict()))
    end.update(_flat("precision", trainer.precision_plugin.state_dict()))
    end.update(_flat("rng", rng_states()))
    stepped = trainer.fit_loop.state_dict()["epoch_loop.state_dict"]["_batches_that_stepped"]  # the step of loggers
    progress = {"global_step": trainer.global_step, "current_epoch": trainer.current_epoch}
    return end | _flat("progress", progress | {"batches_that_stepped": stepped})


def _optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    state = {names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items()}
    order = repr([[(name, *values) for name, values in state.items()], *map(list, optimizer.param_groups)])
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    members = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    return {"state": state, "groups": groups, "members": members, "order": order}


def rng_states() -> dict[str, Any]:
    """Return the state of every generator from which a training step may draw."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002  # user code draws from the legacy generator
    version, internal, gauss = random.getstate()
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types for it
    on_devices = {"cuda": torch.cuda.get_rng_state_all()} if used else {}
    return {
        **on_devices,
        "torch": torch.get_rng_state(),
        "numpy": {"name": name, "keys": torch.tensor(np.asarray(keys).astype(np.int64)), "rest": list(rest)},
        "python": {"version": version, "internal": torch.tensor(internal), "gauss": gauss},
    }


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):  # made of others
        names, context = value.__tensor_flatten__()
        value = {"class": type(value), "context": context, **{name: getattr(value, name) for name in names}}
    if isinstance(value, Tensor):
        return {prefix: value.detach().cpu()}
    if not isinstance(value, (Mapping, list, tuple)):
        return {prefix: value if isinstance(value, (int, float, str, type(None))) else repr(value)}
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {path: leaf for key, item in items for path, leaf in _flat(f"{prefix}/{key}", item).items()}


def differences(reference: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    """Return one line per entry that is missing, surplus or not bit-equal."""
    lines = [f"{key}: missing" for key in reference if key not in got]
    lines += [f"{key}: surplus" for key in got if key not in reference]
    for key in reference:
        if key in got and (line := _difference(reference[key], got[key])):
            lines.append(f"{key}: {line}")
    return lines


def _difference(want: Any, got: Any) -> str | None:
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        # By text: it tells -0.0 from 0.0 and True from 1, and NaN equals itself.
        return None if repr(want) == repr(got) else f"{got!r} instead of {want!r}"
    if want.dtype != got.dtype or want.shape != got.shape:
        return f"{got.dtype}{tuple(got.shape)} instead of {want.dtype}{tuple(want.shape)}"
    if torch.equal(_bytes(want), _bytes(got)):
        return None
    gap = (want.double() - got.double()).abs()
    return f"{int((want != got).sum())} of {want.numel()} elements differ, by up to {float(gap.max()):.3g}"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def record_differences(
    reference: Sequence[Record],
    attempts: Sequence[Sequence[Record]],
    known: Sequence[Record] | None = None,
    repeats_may_differ: Collection[str] = (),
) -> list[str]:
    """Return a line per batch seen differently by some attempt, and per line of the fault-free run's `reference` seen
    by none. `known` is `reference` with lines that need not have been seen; `None` for `reference`. For
    `repeats_may_differ` see `assert_same_end`.
    """
    want = {_coordinates(line): line for line in (reference if known is None else known)}
    needed = {_coordinates(line) for line in reference}
    lines, seen = list[str](), set[tuple[Any, ...]]()
    for index, attempt in enumerate(attempts):
        for line in attempt:
            if line["kind"] == "killed":
                continue
            where = _coordinates(line)
            again = where in seen and line["kind"] in repeats_may_differ
            seen.add(where)
            if (expected := want.get(where)) != line and not again:
                lines.append(f"attempt {index}: {where}{_deviation(line, expected)}")
    return lines + [f"{where} never happened" for where in want if where in needed - seen]


def _deviation(line: Record, expected: Record | None) -> str:
    if expected is None:
        return " is not part of the fault-free run"
    fields = [key for key in line if line[key] != expected.get(key)]
    return ": " + ", ".join(f"{key} {line[key]} instead of {expected.get(key)}" for key in fields)


def _coordinates(line: Record) -> tuple[Any, ...]:
    """Return a line's key: kind, epoch, batch, step and batches seen."""
    return line["kind"], line["epoch"], line["batch"], line["step"], line["seen"]
