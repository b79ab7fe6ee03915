"""The long description of a release: README.md, with links that lead somewhere wherever it is shown.

Links in README are relative, so that they work in every checkout and fork. An index shows the text alone: there a relative
link leads nowhere. Whoever makes a release says where its repository is; without that, links and pictures are left out.
"""

from __future__ import annotations

import re

REPOSITORY = "MOE_CKPT_REPOSITORY"
"""Environment variable: address of the repository at the tag that is released, such as `https://host/owner/name/blob/v1`."""
_IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)\n?")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)]+)\)")


def long_description(readme: str, repository: str | None) -> str:
    """Return README with absolute links.

    Args:
        readme: its text.
        repository: address under which the files of this release are; `None` if it has none yet.
    """
    if repository is None:
        return _LINK.sub(lambda link: link[0] if "://" in link[2] else link[1], _IMAGE.sub("", readme))
    base = repository.rstrip("/")
    text = _IMAGE.sub(lambda link: f"![{link[1]}]({_raw(_absolute(base, link[2]))})\n", readme)
    return _LINK.sub(lambda link: f"[{link[1]}]({_absolute(base, link[2])})", text)


def project_urls(repository: str | None) -> dict[str, str]:
    """Return the addresses that an index shows beside the text; none without a repository.

    Args:
        repository: as for `long_description`.
    """
    if repository is None:
        return {}
    base = repository.rstrip("/")
    home = base.partition("/blob/")[0]
    return {
        "Repository": home,
        "Documentation": f"{base}/docs/index.md",
        "Changelog": f"{base}/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }


def _absolute(base: str, link: str) -> str:
    return link if "://" in link or link.startswith("#") else f"{base}/{link}"


def _raw(address: str) -> str:
    return address.replace("/blob/", "/raw/")
