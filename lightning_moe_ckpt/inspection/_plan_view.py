"""Show the choice of `simulation.choose`: a table, reasons, and a configuration file for LightningCLI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # it has no types, and stubs are not a dependency
from rich.console import RenderableType

from lightning_moe_ckpt._units import read_duration, size_text, time_text
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.inspection._answers import Answer, plain_table
from lightning_moe_ckpt.simulation import EVERY_MEMORY, PlannedRun, Profile, choose, reasons

_PARTS = ("hooks", "slowed", "detection", "startup", "restore", "repeated", "lost", "idle")


def planned(profile: Path, *, mtbf: object, url: str, as_yaml: bool, **limits: Any) -> Answer:
    """Choose for a profile, see `choose`. Raises `ConfigurationError` if the profile cannot be read, or nothing can work."""
    if mtbf is None:
        raise ConfigurationError(
            "`--profile` says what things cost, and the choice depends on how often they fail: add `--mtbf`, the mean time "
            "between failures of the whole run, such as `--mtbf 2h`."
        )
    found = choose(read := Profile.read(profile), read_duration(mtbf).total_seconds(), **limits)
    if as_yaml:
        entry = found[0].document()["callback"]
        entry["init_args"] = {"url": url, **entry["init_args"]}
        text = yaml.safe_dump({"trainer": {"callbacks": [entry]}}, sort_keys=False).rstrip()
        return Answer(entry, lambda: [text])
    best, *others = [each.document() for each in found]
    document = {**best, "why": reasons(found), "alternatives": others}
    return Answer(document, lambda: _tables(read, found))


def _tables(profile: Profile, found: Sequence[PlannedRun]) -> list[RenderableType]:
    best, titles = found[0], [each.label for each in found]
    table = plain_table("", *titles, right=titles)
    step = profile.step_seconds
    rows = {
        "steps between generations": [str(each.every) for each in found],
        "that is": [time_text(float(each.every * step)) for each in found],
        "copies on other nodes": [str(each.system.replicas) for each in found],
        "storage gets one every": [time_text(float(each.storage_seconds)) for each in found],
        "storage per hour": [size_text(each.storage_nbytes_per_hour) for each in found],
        "shared memory of a node": [size_text(each.host_nbytes) for each in found],
        "expected goodput": [f"{each.goodput.share:.2%}" for each in found],
    }
    shares = [each.goodput.shares() for each in found]
    rows |= {
        f"  {part}": [f"{each[part]:.2%}" for each in shares]
        for part in _PARTS
        if any(each[part] >= 5e-5 for each in shares)
    }
    if any(each.lost_portion for each in found):
        rows["lost tokens"] = [f"{each.lost_portion:.2%}" if each.lost_portion else "none" for each in found]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    name, given = best.callback()
    arguments = ", ".join(["url", *(f"{key}={value!r}" for key, value in given.items())])
    said: list[RenderableType] = [table, "why:", *(f"  {text}" for text in reasons(found)), f"{name}({arguments})"]
    if best.spares < best.spares_needed:
        said.append(f"spares: {best.spares} of the profile are too few, see idle: {best.spares_needed} hardly ever are")
    elif best.spares:
        said.append(f"spares: {best.spares}, since a lost one is away for {time_text(float(profile.costs.repair))}")
    return [
        *said,
        f"taken for granted: one failure in {1 / EVERY_MEMORY:.0f} reaches the memory of every node, and takes no machine away",
    ]
