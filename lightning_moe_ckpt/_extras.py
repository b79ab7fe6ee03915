"""Name the extra of this package that brings a package which is not installed."""

from __future__ import annotations

_EXTRA_OF = {"rich": "tools", "matplotlib": "plots", "jsonargparse": "cli", "botocore": "s3"}
"""Names of the extras in pyproject.toml, by the package that they are for."""


def remedy(error: ModuleNotFoundError) -> str | None:
    """Return a sentence that says what to install, or `None` if no extra brings the module.

    Args:
        error: as the import raised it.
    """
    package = (error.name or "").partition(".")[0]
    extra = _EXTRA_OF.get(package)
    if extra is None:
        return None
    return f"This needs {package}, which is not installed: python -m pip install {package}, or the extra `{extra}` of this package."
