"""Write and read folders of torch Distributed Checkpoint (DCP), tensor by tensor: a model may be larger than memory.

`ModelParallelStrategy` loads the folder as its own: keys `state_dict.*` and `optimizer_0.*`, and the rest of Lightning's
checkpoint in `meta.pt`.

torch reads a folder's `.metadata` with pickle, which can run code.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError
from lightning_moe_ckpt.inspection._assemble import LazyTensor
from lightning_moe_ckpt.inspection._transformers import write_whole

META, INDEX = "meta.pt", ".metadata"


class _Streamed(DefaultSavePlanner):
    """Planner for a state on the meta device, whose tensors are read when they are written; `read` goes by identity."""

    def __init__(self, read: Mapping[int, Callable[[], Tensor]]) -> None:
        super().__init__()
        self._read, self._last = read, torch.empty(0)

    @override
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        if id(found) not in self._read:
            return found
        # The writer keeps all tensors until the end of the file, also those that are written: the memory of the last one goes now.
        self._last.untyped_storage().resize_(0)
        self._last = self._read[id(found)]().clone()  # nothing else may be in its memory
        return self._last


def write_dcp(out: Path, content: dict[str, Any], read: Mapping[int, Callable[[], Tensor]]) -> list[Path]:
    """Write a Lightning checkpoint's content to a folder, and return the files; `meta.pt` comes last.

    Args:
        out: folder; files of an earlier export in it are replaced.
        content: Lightning's checkpoint; the optimizer's state by name.
        read: functions that read the tensors that `content` has on the meta device, by the identity of the latter.

    Raises:
        ConfigurationError: the folder cannot be written.
        Corrupt: a stored tensor is damaged.
    """
    states = {f"optimizer_{number}": state for number, state in enumerate(content.pop("optimizer_states", ()))}
    states = {"state_dict": content.pop("state_dict"), **states}
    try:
        out.mkdir(exist_ok=True)
        for stale in (out / META, out / INDEX, *out.glob("__*_*.distcp")):
            stale.unlink(missing_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            writer = FileSystemWriter(out, per_thread_copy_ahead=0)  # one after the other
            save(states, storage_writer=writer, planner=_Streamed(read), no_dist=True)
    except CheckpointException as error:
        ((cause, _),) = error.failures.values()
        if isinstance(cause, CheckpointError):
            raise cause from error
        raise ConfigurationError(f"{out} cannot be written: {cause}.") from error
    except OSError as error:
        raise ConfigurationError(f"{out} cannot be written: {error.strerror or error}.") from error
    write_whole(out / META, partial(torch.save, content))
    return [*sorted(out.glob("__*_*.distcp")), out / INDEX, out / META]


def read_dcp(path: Path) -> dict[str, Any]:
    """Return a folder's state, nested as it was saved, with lazy tensors. Raises `ConfigurationError` if the folder cannot be read."""
    try:
        reader = FileSystemReader(path)
        metadata = reader.read_metadata()
        reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]  # once for all tensors
        flat: dict[str, Any] = {}
        for key, each in metadata.state_dict_metadata.items():
            if isinstance(each, TensorStorageMetadata):
                dtype, shape = each.properties.dtype, tuple(each.size)
                empty = partial(torch.empty, shape, dtype=dtype)
                flat[key] = LazyTensor(dtype, shape, partial(_load, reader, key, empty))
            else:
                flat[key] = _load(reader, key, object)
    except (OSError, RuntimeError, ValueError, CheckpointException) as error:
        raise ConfigurationError(f"{path} is no folder of torch DCP that can be read: {error}.") from error
    return unflatten_state_dict(flat, metadata.planner_data) if metadata.planner_data else flat


def _load(reader: FileSystemReader, key: str, empty: Callable[[], Any]) -> Any:
    state, planner = {key: empty()}, DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        load(state, storage_reader=reader, planner=planner, no_dist=True)
    return state[key]
