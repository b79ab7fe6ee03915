"""Make plans while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from lightning_moe_ckpt.snapshot import WindowLayout


def in_background(make: Callable[[], WindowLayout]) -> Future[WindowLayout]:
    """Make a plan on its own thread: planning thousands of operators takes a good part of a second."""
    made: Future[WindowLayout] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:  # noqa: BLE001  # thread entry: raised by `result` on the training thread
            made.set_exception(error)

    threading.Thread(target=run, name="moe-ckpt-plan", daemon=True).start()
    return made
