"""Checkpoints in a bucket: killed runs resume from an S3 server, and parts of a segment do not stay there."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from door import CheckpointCallback
from lightning.pytorch import Callback, LightningModule, Trainer
from servers._s3 import S3Server
from typing_extensions import override

from campaign._campaign import Campaigns
from campaign._training import Checkpointing, Setup, train
from lightning_moe_ckpt.storage import ObjectBackend, Pace
from lightning_moe_ckpt.testing import Attempt, Kill, Seam


@pytest.mark.parametrize(
    ("name", "world_size"), [("moto", 1), ("rclone", 1), pytest.param("moto", 3, marks=pytest.mark.soak)]
)
def test_a_run_in_a_bucket_survives_kills(
    campaigns: Campaigns, s3: Callable[[str], S3Server], name: str, world_size: int
) -> None:
    """At the end of an epoch and in replay; also where the store ignores conditions."""
    server = s3(name)
    options = tuple(server.storage_options.items())
    policy = Checkpointing(policy="sparse", window=3, url=server.url(), storage_options=options)
    kills = [Kill(phase="forward", step=step, settle=10.0) for step in (5, 6)]
    setup = Setup(world_size=world_size, checkpointing=policy)
    first, *others = campaigns.check(setup, *kills, may_complain=name == "rclone")
    assert first.steps()[0] == 1
    assert all(life.steps()[0] > 1 for life in others)


STEP = 5
put = ObjectBackend.put


def put_for_ever(backend: ObjectBackend, key: str, *views: bytes | memoryview) -> None:
    """Segments of training go in small parts, of which the second does not come; the start is stored as ever."""
    if key.endswith(".safetensors") and "snap/000000000000/" not in key:
        backend._part_nbytes, backend._pace = 1024, Pace(1)
    put(backend, key, *views)


class AwaitsUpload(Callback):
    """Holds training up until the start is stored, and then until a part of a segment is in the bucket."""

    def __init__(self, backend: ObjectBackend) -> None:
        self.backend = backend

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 0:
            (own,) = (callback for callback in trainer.callbacks if isinstance(callback, CheckpointCallback))  # type: ignore[attr-defined]
            assert own.wait_committed()
        deadline = time.monotonic() + 30
        while trainer.global_step == STEP and not uploads(self.backend):
            assert time.monotonic() < deadline, "no upload began"
            time.sleep(0.01)


def uploads(backend: ObjectBackend) -> list[str]:
    """Of this run, under way or left."""
    assert backend.unfinished is not None
    return [upload.key for upload in backend.unfinished.list(backend.full_key(""))]


def train_and_count(setup: Setup, life: Attempt) -> Mapping[str, Any]:
    """Train; the first life never gets a segment stored. Prints what is unfinished before and after."""
    assert setup.checkpointing is not None
    assert setup.checkpointing.url is not None
    backend = ObjectBackend(setup.checkpointing.url, storage_options=dict(setup.checkpointing.storage_options))
    if life.index == 0:
        wait = AwaitsUpload(backend)
        for module, attribute, replacement in (
            ("lightning_moe_ckpt.storage._object", "ObjectBackend.put", put_for_ever),
            ("lightning_moe_ckpt.tiers._tier_worker", "_MOMENT", timedelta(seconds=20)),  # a server may be slow
            ("campaign._training", "Setup.callbacks", lambda *_: [wait]),
        ):
            Seam(module=module, attribute=attribute, replacement=replacement).apply()
    print(f"before: {len(uploads(backend))} uploads")
    returned = train(setup, life)
    print(f"after: {len(uploads(backend))} uploads")
    return returned


@pytest.mark.parametrize(
    ("number", "left"), [(signal.SIGTERM, 0), (signal.SIGKILL, 1)], ids=["aborted-by-sigterm", "left-by-sigkill"]
)
def test_parts_of_a_segment_do_not_stay_in_the_bucket(
    campaigns: Campaigns, moto: S3Server, number: signal.Signals, left: int
) -> None:
    """A process that can, aborts the upload itself; else the next start of the run does."""
    policy = Checkpointing(
        policy="sparse",
        window=2,
        url=moto.url(),
        storage_options=tuple(moto.storage_options.items()),
        arguments=(("stop_grace", timedelta(seconds=1)),),
    )
    setup = replace(Setup(batches=4, validate_every=None), checkpointing=policy)
    kill = Kill(phase="forward", step=STEP, signal=number)
    first, second = campaigns.check(setup, kill, fit=partial(train_and_count, setup), may_complain=True)
    assert first.outcome == ("killed" if left else "stopped")
    assert "before: 0 uploads" in first.log()
    assert f"before: {left} uploads" in second.log()
    assert "after: 0 uploads" in second.log()
