"""Compare the ranks' copies of a parameter: one rank writes the bytes that all ranks get at a restart."""

from __future__ import annotations

from typing import cast

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.snapshot._constants import digested
from lightning_moe_ckpt.snapshot._layout import PARAM, REGIONS, StateView
from lightning_moe_ckpt.storage import digest_of

log = rank_logger(__name__)

_NAMED = 4


class Copies:
    """Compare replicated state among ranks; says once where training has made it differ."""

    def __init__(self, view: StateView, groups: ParallelGroups, exchange: Exchange) -> None:
        self._view, self._groups, self._exchange = view, groups, exchange
        self._told = groups.world_size == 1

    def compare(self, *, first: bool) -> None:
        """Raise (`first`) if parameters or optimizer state differ among ranks; later log parameters that differ.
        Collective.

        Raises:
            ConfigurationError: on all ranks; the message names the parameters.
        """
        lines = [] if self._told else _differing(self._view, self._groups, self._exchange, states=first)
        if lines and first:
            raise ConfigurationError(_text(lines))
        if lines:
            self._told = True
            log.error("a restart will not give what training has now: %s", _text(lines), alike=True)


def _differing(view: StateView, groups: ParallelGroups, exchange: Exchange, *, states: bool) -> list[str]:
    """Describe the parameters that differ among ranks that should hold equal copies, a line each. Collective.

    All bytes count, of parameters and (with `states`) of optimizer state. Buffers may differ by rank, and constants
    were compared when stored.
    """
    own: dict[str, dict[str, str]] = {}
    for region in REGIONS:
        fqns = dict.fromkeys(piece.fqn for op in view.operators if op.holders == region for piece in op.slices)
        forms = [(fqn, entry.key) for fqn in fqns if states for entry in view.schema.entries(view.params[fqn])]
        found = {(fqn, key): view.tensor(fqn, key) for fqn, key in [*((fqn, PARAM) for fqn in fqns), *forms]}
        named = {f"`{fqn}`" if key == PARAM else f"`{key}` of `{fqn}`": each for (fqn, key), each in found.items()}
        holders = str(groups.ranks("expert_data" if region == "expert_data" else "stage"))
        own[f"{region} {holders}"] = digested({name: each for name, each in named.items() if each is not None})
    # Usually all copies are equal: then one digest per region decides.
    parts = {key: digest_of(repr(digests).encode()) for key, digests in own.items()}
    said = cast("list[dict[str, str]]", exchange.gather_values(parts))
    if all(row[key] == other.get(key, row[key]) for row in said for other in said for key in row):
        return []
    rows = cast("list[dict[str, dict[str, str]]]", exchange.gather_values(own))
    lines: list[str] = []
    for key in dict.fromkeys(key for row in rows for key in row):
        held = {rank: row[key] for rank, row in enumerate(rows) if key in row}
        for name in dict.fromkeys(name for digests in held.values() for name in digests):
            like: dict[str | None, list[int]] = {}
            for rank, digests in held.items():
                like.setdefault(digests.get(name), []).append(rank)
            if len(like) > 1:
                lines.append(f"{name} (ranks {' and '.join(map(str, like.values()))} have different ones)")
    return lines


def _text(lines: list[str]) -> str:
    """Return the message for such lines, with effect and remedy."""
    more = f" and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
    return (
        f"{', '.join(lines[:_NAMED])}{more}: ranks should hold these as equal copies, of which one is stored, so that a restart "
        "would give it to all of them. Initialise them alike, or broadcast them before `fit`, and let all ranks apply the same "
        "gradients. Experts that differ by rank belong to `MoEStrategy(expert_parallel=...)`; other parameters that each rank owns, "
        "by parallelism written by hand or as adapters per rank, are not supported yet."
    )
