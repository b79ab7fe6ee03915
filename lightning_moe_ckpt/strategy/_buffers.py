"""Keep buffers equal to rank 0's, as DistributedDataParallel does, but sending only what changed.

Statistics such as those of batch normalisation are computed from each rank's own tokens. They are made equal when an
optimizer step reduces gradients, so that at every step boundary all ranks hold the same buffers.

What changed is known by tensor version counters, but for normalisation layers: their kernels update running
statistics without counting, so in training those always count as changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_moe_ckpt.parallel import ParallelGroups, broadcast_tensors

_PREFIX = "buffer/"


class BufferSync:
    """Watches the buffers of a module; `votes` and `apply` go around the exchange of the gradient reduction.

    Args:
        module: whose buffers.
        ignored: names left to the user.
        groups: this rank's place.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str], groups: ParallelGroups) -> None:
        self._module = module
        self._groups = groups
        self._names = [name for name, _ in module.named_buffers() if name not in ignored]
        self._seen = self._versions()

    @property
    def flags(self) -> list[str]:
        """Names of the flags to send along."""
        return [_PREFIX + name for name in self._names]

    def votes(self) -> dict[str, int]:
        """Which buffers changed on this rank since the last `apply`."""
        now, uncounted = self._versions(), self._uncounted()
        return {_PREFIX + name: int(name in uncounted or now[name] != self._seen[name]) for name in self._names}

    def apply(self, agreed: Mapping[str, int]) -> None:
        """Take rank 0's value of every buffer that changed on any rank. Collective."""
        buffers = self._buffers()
        changed = [buffers[name] for name in self._names if agreed[_PREFIX + name]]
        if changed:
            broadcast_tensors(changed, self._groups.groups["world"], 0)
        self._seen = self._versions()

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self._module.named_buffers())

    def _uncounted(self) -> set[str]:
        return {
            f"{fqn}.{name}" if fqn else name
            for fqn, module in self._module.named_modules()
            if isinstance(module, _NormBase) and module.training
            for name, _ in module.named_buffers(recurse=False)
        }

    def _versions(self) -> dict[str, tuple[int, int]]:
        return {name: (id(buffer), buffer._version) for name, buffer in self._buffers().items()}  # noqa: SLF001
