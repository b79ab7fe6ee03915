"""Checks of arguments as a user wrote them: each error quotes the call and says what it may be."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_moe_ckpt.errors import ConfigurationError


def require_count(owner: object, name: str, value: object, *, what: str, also: Sequence[object] = ()) -> None:
    """Refuse what is not a whole number of one or more.

    Args:
        owner: whose argument it is.
        name: of the argument.
        value: as given.
        what: what is counted.
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
    """Refuse what is not one of `choices`.

    Raises:
        ConfigurationError: the message shows the call.
    """
    if value not in choices:
        listed = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
        raise ConfigurationError(f"`{type(owner).__name__}({name}={value!r})` must be {listed}.")
