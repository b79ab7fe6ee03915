"""Say what an example needs before it begins, in a sentence instead of a traceback."""

from __future__ import annotations

from importlib.util import find_spec


def require(*modules: str) -> None:
    """End the program unless all of these can be imported.

    Args:
        modules: that the extra `examples` brings.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"This example needs {' and '.join(missing)}. In the checkout: python -m pip install '.[examples]'"
        )
