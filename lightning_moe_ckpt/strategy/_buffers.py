"""Keep buffers equal to the stage's first rank, as DistributedDataParallel does, but send only changed buffers.

Each rank computes statistics such as batch normalisation's from its own tokens. Buffers are made equal when an
optimizer step reduces gradients, so that at every step boundary all ranks of a stage hold the same values.

Changes are known from tensor version counters, except in normalisation layers: their kernels update running statistics
without counting, so in training these always count as changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_moe_ckpt.parallel import ParallelGroups, broadcast_tensors

_PREFIX = "buffer/"


class BufferSync:
    """Keep a module's buffers equal, except `ignored`; call `votes` before, `apply` after the reduction's exchange."""

    def __init__(self, module: nn.Module, ignored: Collection[str], groups: ParallelGroups) -> None:
        self._groups = groups
        self._owners: dict[str, tuple[nn.Module, str]] = {
            name: (module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, _ in module.named_buffers()
            if name not in ignored
        }
        self._seen = self._versions()

    @property
    def flags(self) -> list[str]:
        """Names of the flags in the exchange."""
        return [_PREFIX + name for name in self._owners]

    def votes(self) -> dict[str, int]:
        """Return flags of buffers changed on this rank since the last `apply`."""
        now = self._versions()
        return {
            _PREFIX + name: int(_is_uncounted(owner) or now[name] != self._seen[name])
            for name, (owner, _) in self._owners.items()
        }

    def apply(self, agreed: Mapping[str, int]) -> None:
        """Take the first rank's value of every buffer changed on any rank of the stage. Collective."""
        changed = [self._buffer(name) for name in self._owners if agreed[_PREFIX + name]]
        if changed:
            broadcast_tensors(changed, self._groups.groups["stage"], self._groups.ranks("stage")[0])
        self._seen = self._versions()

    def _buffer(self, name: str) -> Tensor:
        owner, key = self._owners[name]
        return owner.get_buffer(key)

    def _versions(self) -> dict[str, tuple[int, int]]:
        buffers = {name: self._buffer(name) for name in self._owners}
        return {name: (id(buffer), buffer._version) for name, buffer in buffers.items()}  # noqa: SLF001


def _is_uncounted(owner: nn.Module) -> bool:
    return isinstance(owner, _NormBase) and owner.training
