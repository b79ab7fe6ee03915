"""Rules for classes of libraries, found by name, so that no library is imported for it.

They come before detection by shape and after what a user registers. A rule answers for its class and for subclasses
of it, wherever those are defined.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_moe_ckpt.operators.adapters._deepspeed import DEEPSPEED
from lightning_moe_ckpt.operators.adapters._fastmoe import FASTMOE
from lightning_moe_ckpt.operators.adapters._hugging_face import HUGGING_FACE
from lightning_moe_ckpt.operators.adapters._megablocks import MEGABLOCKS
from lightning_moe_ckpt.operators.adapters._megatron import MEGATRON
from lightning_moe_ckpt.operators.adapters._registry import AdapterFactory
from lightning_moe_ckpt.operators.adapters._scattermoe import SCATTERMOE
from lightning_moe_ckpt.operators.adapters._torchtitan import TORCHTITAN
from lightning_moe_ckpt.operators.adapters._tutel import TUTEL

_RULES: Mapping[str, Mapping[str, AdapterFactory]] = {
    "deepspeed": DEEPSPEED,
    "fmoe": FASTMOE,
    "megablocks": MEGABLOCKS,
    "megatron": MEGATRON,
    "scattermoe": SCATTERMOE,
    "torchtitan": TORCHTITAN,
    "transformers": HUGGING_FACE,
    "tutel": TUTEL,
}
"""By the library's top package, then by the name of the MoE block's class."""


def find_class_rule(module: nn.Module) -> AdapterFactory | None:
    """The rule for the module's class or its nearest base that has one."""
    for base in type(module).__mro__:
        rule = _RULES.get(base.__module__.partition(".")[0], {}).get(base.__name__)
        if rule is not None:
            return rule
    return None
