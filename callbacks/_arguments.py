"""Check the arguments of callbacks; each error quotes the call as the user wrote it and names the allowed values."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_moe_ckpt.errors import ConfigurationError


def require_count(owner: object, name: str, value: object, *, what: str, also: Sequence[object] = ()) -> None:
    """Raise unless `value` is an integer of at least 1, or one of `also`.

    Args:
        owner: the object whose constructor took the argument.
        name: name of the argument.
        value: the value that the user gave.
        what: what the number counts; the message says it.
        also: other values that are allowed.

    Raises:
        ConfigurationError: the message shows the call.
    """
    if any(value is each or value == each for each in also) and not isinstance(value, bool):
        return
    # A bool is an int to Python, never to whoever wrote it.
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return
    others = "".join(f"{each!r} or " for each in also)
    raise ConfigurationError(f"`{type(owner).__name__}({name}={value!r})` must be {others}1 or more {what}.")


def require_choice(owner: object, name: str, value: object, choices: Sequence[str | None]) -> None:
    """Raise unless `value` is one of `choices`.

    Raises:
        ConfigurationError: the message shows the call.
    """
    if value not in choices:
        listed = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
        raise ConfigurationError(f"`{type(owner).__name__}({name}={value!r})` must be {listed}.")
