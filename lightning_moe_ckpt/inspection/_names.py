"""Choose the tensors of an exported file and their names: those of the module's own `state_dict`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.storage import ModuleEntry


def state_dict_names(
    stored: Iterable[str], module: ModuleEntry, *, leave_out: Sequence[str], ties: Mapping[str, str]
) -> dict[str, str]:
    """Return the names in the file, each with its stored name.

    Args:
        stored: stored names of parameters and buffers.
        module: description of the trained module.
        leave_out: patterns of names to leave out.
        ties: further names, each with the stored name that it stands for.

    Raises:
        ConfigurationError: a name in `ties` is taken, or its stored name does not exist.
    """
    known = set(stored)
    unsaved = set(module.unsaved)
    names = {name: name for name in stored if name not in unsaved} | dict(module.aliases)
    for new, name in ties.items():
        if name not in known or new in names:
            raise ConfigurationError(f"`--tie {new}={name}`: {name} must be stored, and {new} must not.")
        names[new] = name
    return {name: names[name] for name in names if not any(fnmatchcase(name, each) for each in leave_out)}
