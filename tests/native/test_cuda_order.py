"""The CUDA engine keeps order by events alone; shown on a script of calls, since events have no other trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from door import CompiledCudaTicket, TorchDevice

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native import _cuda as engine_module
from lightning_moe_ckpt.native._cuda import CudaCopyEngine
from lightning_moe_ckpt.native._engine import CopyList

DEVICE = torch.device("cuda", 0)


class Script:
    """Stands in for `torch.cuda` and writes down what is asked of streams and events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self.finished = False
        self.names: dict[int, str] = {}
        self.training = self.stream("training")
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda device: self.training if device == DEVICE else self.stream(str(device))
        )
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: self.stream("side"))
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "stream", self.inside)
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
        monkeypatch.setattr(
            torch.cuda,
            "cudart",
            lambda: SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister),
        )
        run = CopyList.run

        def noted(copies: CopyList, *, non_blocking: bool = False) -> None:
            self.lines.append(f"copy {len(copies)} non_blocking={non_blocking}")
            run(copies, non_blocking=non_blocking)

        monkeypatch.setattr(CopyList, "run", noted)

    def event(self, *, blocking: bool = False) -> Any:
        name = "arrived" if blocking else "ready"
        return SimpleNamespace(
            name=name,
            record=lambda stream: self.lines.append(f"{name} recorded on {stream.name}"),
            query=lambda: self.finished,
            synchronize=lambda: self.lines.append(f"host waits for {name}"),
        )

    def stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            wait_event=lambda event: self.lines.append(f"{name} waits for {event.name}"),
            wait_stream=lambda stream: self.lines.append(f"{name} waits for stream {stream.name}"),
            synchronize=lambda: self.lines.append(f"host waits for stream {name}"),
        )

    def register(self, start: int, nbytes: int, flags: int) -> int:
        self.lines.append(f"register {nbytes} flags={flags}")
        return 0

    def unregister(self, start: int) -> int:
        self.lines.append("unregister")
        return 0

    @contextmanager
    def inside(self, stream: Any) -> Iterator[None]:
        self.lines.append(f"enter {stream.name}")
        yield
        self.lines.append(f"leave {stream.name}")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


def test_copies_follow_training_and_the_optimizer_follows_the_copies(script: Script) -> None:
    """Side stream behind training, training behind the copies; the host waits only in `wait`."""
    engine = CudaCopyEngine(DEVICE)
    ticket = engine.submit([(torch.ones(2), torch.zeros(2))])
    engine.fence(ticket)
    assert script.lines == [
        "ready recorded on training",
        "side waits for ready",
        "enter side",
        "copy 1 non_blocking=True",
        "leave side",
        "arrived recorded on side",
        "training waits for arrived",
    ]
    engine.wait(ticket)
    assert script.lines[-1] == "host waits for arrived"


def test_sources_are_held_until_the_event_has_passed(script: Script) -> None:
    """The allocator must not give a source to anybody else while the copy engine reads it."""
    engine = CudaCopyEngine(DEVICE)
    first = engine.submit([(torch.ones(2), torch.zeros(2))])
    engine.submit([(torch.ones(2), torch.zeros(2))])
    assert len(engine._pending) == 2
    script.finished = True
    engine.submit([])
    assert len(engine._pending) == 1
    assert first.done


def test_a_failed_copy_still_marks_its_end(script: Script) -> None:
    """Some copies may be queued already: nothing may be reused before they ran, and then the error is raised."""
    engine = CudaCopyEngine(DEVICE)
    ticket = engine.submit([(torch.ones(2), torch.zeros(3))])
    assert script.lines[-1] == "arrived recorded on side"
    with pytest.raises(CheckpointError, match="snapshot of 1 slices failed"):
        engine.wait(ticket)
    assert script.lines[-1] == "host waits for arrived"
    with pytest.raises(CheckpointError):
        engine.fence(ticket)
    assert script.lines[-1] == "training waits for arrived"


def test_the_end_is_behind_what_is_copied_from_other_devices(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch does not take the side stream there: an event on that alone would pass before the bytes have arrived."""
    monkeypatch.setattr(CopyList, "devices", lambda _: {DEVICE, torch.device("cuda", 1)})
    CudaCopyEngine(DEVICE).submit([(torch.ones(2), torch.zeros(2))])
    assert script.lines[-2:] == ["side waits for stream cuda:1", "arrived recorded on side"]


def test_memory_is_registered_in_pieces_and_copies_are_cut_there(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that touches two registered pieces would be refused by the driver."""
    monkeypatch.setattr(engine_module, "PIECE_NBYTES", 4096)
    engine, buffer = CudaCopyEngine(DEVICE), torch.zeros(10_000, dtype=torch.uint8)
    engine.register(buffer)
    assert script.lines == ["register 4096 flags=1", "register 4096 flags=1", "register 1808 flags=1"]
    src = torch.arange(10_000).to(torch.uint8)
    engine.submit([(src, buffer)])
    assert "copy 3 non_blocking=True" in script.lines
    assert torch.equal(src, buffer)
    engine.unregister(buffer)
    assert script.lines[-3:] == ["unregister"] * 3


def test_close_waits_for_the_side_stream(script: Script) -> None:
    """What was submitted is finished; without a submit there is nothing to wait for."""
    engine = CudaCopyEngine(DEVICE)
    engine.close()
    assert script.lines == []
    engine.submit([])
    engine.close()
    assert script.lines[-1] == "host waits for stream side"


@pytest.mark.parametrize("reads_host", [False, True])
def test_the_host_waits_where_the_device_reads_from_it(
    script: Script, reads_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stream keeps the host from overwriting its own memory after the fence."""
    script.training.cuda_stream = 0
    monkeypatch.setattr(TorchDevice, "is_capturing", lambda _: False)
    ticket: Any = SimpleNamespace(
        release_sources=lambda: None,
        done=False,
        number=1,
        worker=SimpleNamespace(handle=None, call=lambda name, *_: script.lines.append(name)),
        wait=lambda: script.lines.append("wait"),
    )
    CompiledCudaTicket(ticket, TorchDevice(DEVICE), reads_host=reads_host).fence()
    assert script.lines == ["fence", "wait"][: 1 + reads_host]
