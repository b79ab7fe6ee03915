"""Audits find devices that compute or hold wrong bits, name them, and raise no false alarm."""

from __future__ import annotations

import os
import pytest

from campaign._audits import PLACES, draw_setup, audits_of, inject, table
from campaign._campaign import Campaigns


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_injected_faults_are_found_and_named(campaigns: Campaigns, pytestconfig: pytest.Config) -> None:
    """Five kinds in all places, four times each and more."""
    places = [p for p in PLACES if os.environ.get("AP", "") in p]
    first, n = int(os.environ.get("AS", "0")), int(os.environ.get("AN", "1"))
    answers = inject(campaigns, places, range(first, first + n))
    with open(os.environ.get("AO", "/tmp/audits.txt"), "a") as out:
        for each in answers:
            print(each.place, each.fault, each.setup.checkpointing.policy, getattr(each.setup, "model", ""), each.setup.precision, each.setup.workers, "|", each.outcome, "|", each.exact, [f["text"] for f in each.findings], file=out, flush=True)
        print(table(answers), file=out, flush=True)
