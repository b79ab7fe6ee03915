"""A start of the job that wakes up late commits nothing over its successor, and deletes nothing that is needed."""

from __future__ import annotations

import signal

import pytest
from servers._s3 import S3Server

from campaign._campaign import Campaigns, checkpoints
from campaign._overlap import Overlap, PatientSetup, in_mid_file
from campaign._training import Checkpointing
from lightning_moe_ckpt.inspection import verify
from lightning_moe_ckpt.storage import Backend, RunView, open_backend
from lightning_moe_ckpt.testing import Kill


def asleep(verb: str, *, operation: int = 0, rank: int = 0, after: bool = False) -> Kill:
    return Kill(phase="storage", verb=verb, operation=operation, rank=rank, after=after, signal=signal.SIGSTOP)


def places(world_size: int) -> dict[str, Overlap]:
    """Where the first start falls asleep while it saves step 4, 5 or 6 of 10."""
    last = world_size - 1
    segment = f"rank{last:05d}.{4:012d}.safetensors"
    return {
        "in mid file": Overlap(asleep_at=None, seams=[in_mid_file(segment)]),
        "before a segment": Overlap(asleep_at=asleep(rf"^put .*{segment}", rank=last)),
        "before a marker": Overlap(asleep_at=asleep(r"^put .*\.done", operation=4, rank=last)),
        "after its marker": Overlap(asleep_at=asleep(r"^put .*\.done", operation=4, rank=last, after=True)),
        "before the commit": Overlap(asleep_at=asleep(r"^create .*_COMMITTED", operation=4)),
        "before a commit that comes late": Overlap(
            asleep_at=asleep(r"^create .*_COMMITTED", operation=4), lose=f"checkpoints/snap/*4/*/rank{last:05d}.done"
        ),
        "before the watermark": Overlap(asleep_at=asleep(r"^create _log/", operation=4)),
        "after the watermark": Overlap(asleep_at=asleep(r"^create _log/", operation=4, after=True)),
        "between deletions": Overlap(asleep_at=asleep(r"^delete snap/.*done", operation=2)),
    }


SHORT = [("before a marker", 3), ("before a commit that comes late", 1), ("between deletions", 1)]
LONG = [(name, world_size) for world_size in (1, 3) for name in places(1) if (name, world_size) not in SHORT]
CASES = [*SHORT, *(pytest.param(*case, marks=pytest.mark.soak) for case in LONG)]
# Files can be half written, and lost, only where they are files.
ON_S3 = [case for case in LONG if "mid file" not in case[0] and "late" not in case[0]]
IN_A_BUCKET = [("before the watermark", 1), *(pytest.param(*case, marks=pytest.mark.soak) for case in ON_S3)]


@pytest.mark.parametrize(("name", "world_size"), CASES)
def test_a_late_start_is_fenced_on_files(campaigns: Campaigns, name: str, world_size: int) -> None:
    """Stopped anywhere while it saves, woken up when its successor has committed twice and trains on."""
    setup = PatientSetup(world_size=world_size, checkpointing=Checkpointing(policy="dense", keep=2))
    first = campaigns.check_overlap(setup, places(world_size)[name])
    require_fenced(open_backend(str(checkpoints(first.workdir))), first.log(), name)


@pytest.mark.parametrize(("name", "world_size"), IN_A_BUCKET)
def test_a_late_start_is_fenced_in_a_bucket(campaigns: Campaigns, moto: S3Server, name: str, world_size: int) -> None:
    """The same over S3."""
    url, options = moto.url(), moto.storage_options
    stored = Checkpointing(policy="dense", keep=2, url=url, storage_options=tuple(options.items()))
    setup = PatientSetup(world_size=world_size, checkpointing=stored)
    first = campaigns.check_overlap(setup, places(world_size)[name])
    require_fenced(open_backend(url, storage_options=options), first.log(), name)


def require_fenced(backend: Backend, said: str, name: str) -> None:
    """The first start ended with `Fenced`; what it committed late is dead; all that can be restored is whole."""
    assert "lightning_moe_ckpt.errors.Fenced" in said.splitlines()[-1] or "Fenced: " in said, said
    view = RunView.open(backend)
    assert view.history is not None
    found = view.generations()
    usable = [each.generation for each in found if each.usable]
    assert [(each.step, each.incarnation) for each in usable] == [(10, 2), (9, 2)]
    late = [each for each in found if each.generation.incarnation == 1 and each.committed]
    assert all(each.dead is not None for each in late), late
    assert view.history.last_incarnation == 2
    assert verify(backend).sound
