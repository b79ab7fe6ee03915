"""Compare the releases of the libraries that decide the bits of a step with those that markers name.

The same weights, journal and data give the same bits only in the same kernels and the same loops. Nothing stored says
whether another release computes alike, so a resume with another one goes on, and says that it may not be exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import metadata

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination._exchange import Exchange

log = rank_logger(__name__)

VERSIONS = "versions"
"""Key in a marker's `policy`."""
_DISTRIBUTIONS = ("torch", "lightning", "lightning-moe-ckpt")


_version = cache(metadata.version)


def own_versions() -> dict[str, str]:
    """Return the releases of this process, by distribution."""
    return {name: _version(name) for name in _DISTRIBUTIONS}


def agreed_versions(exchange: Exchange) -> dict[str, str]:
    """Return the releases of rank 0, for all markers; a rank with others is named in a warning. Collective."""
    own = own_versions()
    said = exchange.gather_values(own)
    agreed = said[0]
    assert isinstance(agreed, dict)
    others = {rank: each for rank, each in enumerate(said) if each != agreed}
    if others and exchange.is_coordinator:
        rank, versions = next(iter(others.items()))
        log.warning(
            "ranks %s do not run what rank 0 runs (rank %d: %s; rank 0: %s): exact restarts are promised only where "
            "all ranks have the same versions. Install the same everywhere",
            *(sorted(others), rank, in_words(versions), in_words(agreed)),
        )
    return agreed


def warn_of_other_versions(policy: Mapping[str, object], generation: object, now: Mapping[str, str]) -> None:
    """Warn that a restart may not be exact, if the generation was written by other releases.

    Args:
        policy: the generation's `policy`.
        generation: name of the generation.
        now: releases of this job.
    """
    stored = policy.get(VERSIONS)
    if stored == now:
        return
    log.warning(
        "%s was written with %s, and this job runs %s: its state is restored as it was, but that the steps after it "
        "are exact, bit for bit, is promised only with the versions that wrote it. Install those to be sure",
        *(generation, in_words(stored), in_words(now)),
    )


def in_words(versions: object) -> str:
    """Return the releases as a list for people."""
    if not isinstance(versions, Mapping):
        return "versions that it does not say"
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
