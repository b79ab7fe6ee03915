"""Audits find devices that compute or hold wrong bits, name them, and raise no false alarm."""

from __future__ import annotations

import pytest

from campaign._audits import KINDS, PLACES, draw, inject, table
from campaign._campaign import Campaigns


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_injected_faults_are_found_and_named(campaigns: Campaigns, pytestconfig: pytest.Config) -> None:
    """Five kinds in all places, four times each and more."""
    import os
    places = [p for p in PLACES if os.environ.get("AP", "") in p]
    kinds = [k for k in KINDS if os.environ.get("AK", "") in k]
    first, n = int(os.environ.get("AS", "0")), int(os.environ.get("AN", "1"))
    answers = inject(campaigns, [draw(f"{seed} {place} {kind}", place, kind) for seed in range(first, first+n) for place in places for kind in kinds])
    out = open(os.environ.get("AO", "/tmp/audits.txt"), "a")
    for each in answers:
        s = each.injection
        print(s.place, s.fault, s.setup.checkpointing.policy, getattr(s.setup, "model", ""), s.setup.precision, s.setup.workers, "|", each.outcome, "| changed", each.changed, "|", each.audits, [f["text"] for f in each.findings], file=out, flush=True)
    print(table(answers), file=out, flush=True)
