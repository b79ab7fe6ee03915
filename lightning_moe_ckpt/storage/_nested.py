"""One buffer that is a segment for memory and holds, without a copy, the smaller segment that goes to storage.

```text
[outer header][inner header][inner tensors ...][rest ...]
              '------- the inner file --------'
```

The first tensor of the outer safetensors file, `persisted_header`, is the header of the inner one. Headers are whole
pages and both files align alike, so every tensor of the inner file lies in the outer one at the same place, `shift`
bytes further on, with the same fillers behind it.

Source: PEC (2024), Sec. 4: two levels, of which host memory takes more experts than storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lightning_moe_ckpt.storage._segment import SegmentLayout, TensorSpec

PERSISTED_HEADER = "persisted_header"


class NestedLayout:
    """Places of all tensors of a segment, of which the first ones are a segment of their own."""

    def __init__(
        self, inner: Sequence[TensorSpec], rest: Sequence[TensorSpec], *, metadata: Mapping[str, str], align: int = 64
    ) -> None:
        """Lay tensors out.

        Args:
            inner: of both files, in order.
            rest: of the outer file only, behind the others.
            metadata: goes into both headers.
            align: bytes on which every tensor starts, a power of two up to a page.

        Raises:
            ValueError: as `SegmentLayout`, or a tensor is called `persisted_header`.
        """
        self.inner = SegmentLayout(inner, metadata=metadata, align=align)
        """The file for storage, whose first byte is at `shift`."""
        header = TensorSpec(PERSISTED_HEADER, torch.uint8, (len(self.inner.header),))
        self.outer = SegmentLayout([header, *inner, *rest], metadata=metadata, align=align)
        """The whole buffer."""
        self.shift = len(self.outer.header)
        """Offset of the inner file in the outer one, and of each of its tensors there against here; whole pages."""

    @property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return self.outer.nbytes

    def write_header(self, buffer: torch.Tensor) -> None:
        """Write both headers into `buffer` (uint8, 1-D, at least `nbytes`) and zeros into the gaps."""
        self.outer.write_header(buffer)
        self.inner.write_header(self.persisted(buffer))

    def view(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        """The tensor `name` of either file inside `buffer`, without a copy."""
        return self.outer.view(buffer, name)

    def persisted(self, buffer: torch.Tensor) -> torch.Tensor:
        """The bytes of the inner file inside `buffer`, without a copy."""
        return buffer[self.shift : self.shift + self.inner.nbytes]
