"""A first-in, first-out queue of collectives beside the training thread.

Ranks must enter the collectives of a group in the same order. A queue with a single worker keeps the order of
submission. On CPU the worker is a thread (gloo waits without the GIL); on CUDA it is a side stream, so the host does
not wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.futures import Future

Work = Callable[[], Tensor]


class CollectiveQueue:
    """Runs submitted work in order; starts its worker with the first `submit`."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Work, Future[Tensor]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None

    def __reduce__(self) -> tuple[type[CollectiveQueue], tuple[()]]:
        """Copy and pickle as a new lane without work, because a Trainer or callback with a lane may be copied."""
        return CollectiveQueue, ()

    def submit(self, work: Work, device: torch.device, after: Iterable[torch.cuda.Stream] = ()) -> Future[Tensor]:
        """Queue `work`, which reads and writes memory that the caller leaves alone until the future is done.

        Args:
            work: function to run.
            device: device of its memory.
            after: streams that have written to that memory, besides the current one.

        Returns:
            A future of the result. Its `wait` raises what `work` raised.
        """
        if device.type == "cuda":
            return self._enqueue_on_stream(work, device, after)
        if self._thread is None:
            # Daemon: a collective whose peer died must not keep this process from ending.
            self._thread = threading.Thread(target=self._drain, name="gradient-reduction", daemon=True)
            self._thread.start()
        future: Future[Tensor] = Future()
        self._jobs.put((work, future))
        return future

    def close(self) -> None:
        """End the worker after its queued work; abandon it if it hangs."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=5)
            self._thread = None

    def _enqueue_on_stream(
        self, work: Work, device: torch.device, after: Iterable[torch.cuda.Stream]
    ) -> Future[Tensor]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for stream in {torch.cuda.current_stream(device), *after}:
            self._stream.wait_stream(stream)
        future: Future[Tensor] = Future(devices=[device])
        with torch.cuda.stream(self._stream), torch.no_grad():
            future.set_result(work())  # remembers this stream; `wait` makes the waiting stream wait for it
        return future

    def _drain(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, future = job
            try:
                with torch.no_grad():
                    future.set_result(work())
            except Exception as error:  # noqa: BLE001  # thread entry: the waiter raises it
                future.set_exception(error)  # type: ignore[arg-type]  # its stub says the result type
            # The error has this frame, the future has the error, and the collector does not look into futures.
            del work, future


def stream_writing(tensor: Tensor) -> torch.cuda.Stream | None:
    """Return the stream on which the caller now writes to a tensor; `None` on the CPU.

    Backward runs every hook on the stream of its forward, and a model may have several.
    """
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
