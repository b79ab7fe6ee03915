"""Carry out `moe-ckpt run`: make torch's configuration from its own options, and run the supervisor with it."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters, RendezvousTimeoutError, registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, parse_args

from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError
from lightning_moe_ckpt.launch._agent import SupervisingAgent, SupervisorOptions
from lightning_moe_ckpt.launch._job_log import FailureRate
from lightning_moe_ckpt.launch._members import RankOutput
from lightning_moe_ckpt.launch._network import address_towards
from lightning_moe_ckpt.launch._supervised import Line

_RESTARTS = 1_000_000
"""Restarts of all ranks that torch's agent may count; the supervisor counts failures itself."""

_KEEP_ALIVE = {"keep_alive_interval": 2, "keep_alive_max_attempt": 5}
"""Seconds between two signs of life of a node, and how many may be missing; torch's own are 5 and 3."""

_IMPORTING = (sys.executable, "-u", "-m", "lightning_moe_ckpt.launch._spares")
_FAILED, _KILLED = 1, 128
_REPEAT_SECONDS = 1.0
"""Seconds within which another signal counts as the first one."""
_FLUSH = """
import json, signal, sys; from datetime import timedelta; signal.setitimer(signal.ITIMER_REAL, limit := float(sys.argv[1]))
from lightning_moe_ckpt.inspection.commands import flush; run = json.load(sys.stdin)
sys.exit(flush(url=run["url"], storage_option=run["storage_option"], wait=timedelta(seconds=min(30, limit / 2))))"""
"""Program with storage options in its standard input, since these may be secret."""
_READ_SECONDS, _STATIC_SECONDS, _TELL_SECONDS = 60.0, 600.0, 10.0
"""Seconds that torch waits for its store, and for all nodes of a static meeting; seconds between two sentences about it."""
_OTHER_PORT = "If something else listens there, give another port: `--rdzv-endpoint HOST:PORT`, or `--master-port`."

_JOIN_SECONDS, _MEET_SECONDS = 600, 60
"""Torch's limit for a node that waits to take part, and seconds of it that a meeting may need."""

T = TypeVar("T")


def run(
    command: Sequence[str],
    *,
    torchrun: Sequence[str] = (),
    module: bool = False,
    spares: int = 0,
    spare_at: str = "strategy",
    max_failures: str = "10 per 1h",
    recover_timeout: float = 300.0,
    hang_timeout: float = 10.0,
    node_timeout: float = 60.0,
    grow_every: float = 300.0,
    flush_timeout: float = 600.0,
) -> int:
    """Start the ranks of a job on this node, and keep it running; arguments are the options of `moe-ckpt run`, times in seconds.

    Return 0 if all ranks have ended well, 1 if the job was given up, 128 and its number after a signal.
    """
    options = SupervisorOptions(
        spares=spares,
        spare_command=(*_IMPORTING, *(["-m"] if module else []), *command) if spare_at == "imports" else (),
        max_failures=FailureRate.parse(max_failures),
        recover_seconds=recover_timeout,
        hang_seconds=hang_timeout,
        wait_seconds=node_timeout,
        grow_seconds=grow_every,
        say=_say,
    )
    given = _given(torchrun)
    if spare_at == "imports" and "--no-python" in given:
        raise ConfigurationError(
            "`--spare-at imports` imports in Python before SCRIPT runs, which `--no-python` says is none. Leave one of them out."
        )
    arguments = [
        *([] if given & {"--log-dir", "--redirects", "--tee", "--local-ranks-filter"} else ["--log-dir", os.devnull]),
        *([*torchrun, *_rendezvous(given)] if "--standalone" in given else [*_rendezvous(given), *torchrun]),
        *(["--module"] if module else []),
        *command,
    ]
    supervisor = _supervisor(arguments, options, limited="--max-restarts" in given)
    meeting, closes, status = supervisor.get_worker_group().spec.rdzv_handler, True, _FAILED
    try:
        result = supervisor.run()
        status = _FAILED if result is None or result.is_failed() else 0
    except SignalException as error:
        _say(f"{signal.Signals(error.sigval).name}: all ranks were told to stop, and have ended")
        # Nodes that were not told to stop may wait for this one to come back; a closed meeting lets nobody in.
        closes = getattr(getattr(meeting, "settings", None), "max_nodes", 1) == 1
        status = _KILLED + error.sigval
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        _say(f"nodes have not met ({type(error).__name__}), and the job is given up: {_sentence_of(error)}")
    finally:
        supervisor.close()
        if closes:
            meeting.shutdown()
    for run_left in options.left.values() if status and flush_timeout else ():
        _flush(run_left, flush_timeout)
    return status


def _flush(run: Line, limit: float) -> None:
    """Store a run's generations in this node's memory, by another process until a signal; memory stays in any case."""
    url, memory, began = run["url"], Path(run["leaves"]), time.monotonic()
    if not any(memory.parent.glob(f"{memory.name}*")):
        return  # ranks have stored all of it themselves
    _say(f"memory of {url} goes to storage, in at most {limit:g} s (--flush-timeout). Ended earlier, the node loses it")
    # Not ignored any more, here or in the process to be started. Launchers repeat a signal at once.
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(each, lambda *_: child.terminate() if time.monotonic() > began + _REPEAT_SECONDS else None)
    child = subprocess.Popen(  # noqa: S603  # our own command
        [sys.executable, "-c", _FLUSH, str(limit)],
        env=os.environ | {"MOE_CKPT_SHARED_MEMORY": str(memory.parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for line in child.communicate(json.dumps(run))[0].splitlines():
        _say(line)
    whys = {-signal.SIGALRM: f"{limit:g} s were not enough; ", -signal.SIGTERM: "another signal came; "}
    if child.returncode:
        why = whys.get(child.returncode, "")
        _say(f"{why}memory stays as it was: `moe-ckpt flush {url}` on this node goes on with it")


def _supervisor(arguments: list[str], options: SupervisorOptions, *, limited: bool) -> SupervisingAgent:
    """Do the work of torch's `launch_agent`, made for one agent only."""
    # Ranks must find the store in the agent: the one that would serve it otherwise is a rank, and may die.
    os.environ.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    parse: Any = parse_args
    # One signal, one sentence: torch's says what ours say.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    for name in ("agent.server.api", "multiprocessing.api"):  # have levels of their own
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        config, entrypoint, entrypoint_arguments = config_from_args(parse(arguments))
        meeting = _KEEP_ALIVE | _limits(config, options) | config.rdzv_configs
        rendezvous = RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            **_own_address(config) | meeting,
        )
        limit = 2 * float(meeting.get("read_timeout", _READ_SECONDS))
        handler = _met(lambda: registry.get_rendezvous_handler(rendezvous), config.rdzv_endpoint, limit)
        if config.rdzv_backend == "static":  # which connects later, and the supervisor says for whom this node waits
            limit = float(meeting.get("timeout", _STATIC_SECONDS))
            limit += min(limit, _TELL_SECONDS)  # torch's own sentence comes first, where it has one
            meet = partial(_met, handler.next_rendezvous, config.rdzv_endpoint, limit, tell_seconds=limit)
            handler.next_rendezvous = meet  # type: ignore[method-assign]
    except (AssertionError, ValueError, RendezvousError) as error:
        raise CheckpointError(_sentence_of(error)) from error
    options = dataclasses.replace(
        options,
        max_restarts=config.max_restarts if limited else None,
        node_seconds=float(meeting["keep_alive_interval"]) * int(meeting["keep_alive_max_attempt"]),
    )
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    # Versions of torch differ in what a specification has besides.
    names = [field.name for field in dataclasses.fields(WorkerSpec) if hasattr(config, field.name)]
    shared: dict[str, Any] = {name: getattr(config, name) for name in names}
    static = config.rdzv_endpoint.rpartition(":") if config.rdzv_backend == "static" else (None, None, None)
    spec = WorkerSpec(
        **shared
        | {
            "local_world_size": config.nproc_per_node,
            "entrypoint": entrypoint,
            "args": tuple(entrypoint_arguments),
            "rdzv_handler": handler,
            "max_restarts": _RESTARTS,
            "master_addr": static[0],
            "master_port": static[2] and int(static[2]),
        }
    )
    assert config.logs_specs is not None
    seconds = getattr(config, "shutdown_timeout", None)
    return SupervisingAgent(
        spec, RankOutput(config.logs_specs), options, **({} if seconds is None else {"shutdown_timeout": seconds})
    )


def _own_address(config: LaunchConfig) -> dict[str, Any]:
    """Return torch's settings for this node's address, and whether nodes meet here where its host name does not say so."""
    host = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=0)[0]
    own, interface = address_towards(host)
    found = {"local_addr": own, "is_host": own == socket.gethostbyname(host)} if interface else {}
    return found | ({"local_addr": config.local_addr} if config.local_addr else {})


def _limits(config: LaunchConfig, options: SupervisorOptions) -> dict[str, int]:
    """Return torch's limits for meetings of MIN to MAX nodes. Raises `ConfigurationError` if nodes can meet once only."""
    if config.min_nodes == config.max_nodes:
        return {}
    if config.rdzv_backend == "static":
        raise ConfigurationError(
            "`--nnodes MIN:MAX` needs a place to meet again: --rdzv-endpoint HOST:PORT instead of --node-rank and --master-addr."
        )
    # A node that waits to be let in must not give up before it can be.
    join = max(_JOIN_SECONDS, math.ceil(options.wait_seconds + options.grow_seconds) + _MEET_SECONDS)
    return {"last_call_timeout": max(1, math.ceil(options.wait_seconds)), "join_timeout": join}


def _met(meet: Callable[[], T], where: str, limit: float, *, tell_seconds: float = _TELL_SECONDS) -> T:
    """Return the result of `meet`, from a thread: torch waits for ever, and without signals, where a stranger takes its connection. Raises
    `CheckpointError` if the listener there does not answer in `limit` seconds.
    """
    began, met = time.monotonic(), Future[T]()

    def work() -> None:
        try:
            met.set_result(meet())
        except BaseException as error:  # noqa: BLE001  # thread entry: the other thread raises it
            met.set_exception(error)

    threading.Thread(target=work, name="moe-ckpt-meeting", daemon=True).start()
    while (passed := time.monotonic() - began) < limit:
        pause = min(tell_seconds, limit - passed)
        if wait([met], pause).done:
            return met.result()
        if passed + pause < limit:
            _say(f"waiting for an answer from {where}, {passed + pause:.0f} s")
    raise CheckpointError(f"nothing at {where} answers as torch's rendezvous does, for {limit:.0f} s. {_OTHER_PORT}")


def _sentence_of(error: Exception) -> str:
    """Return the first lines of an error of torch and of its cause, since torch's messages have stacks in them, and the remedy."""
    if isinstance(error, RendezvousTimeoutError):
        return "fewer nodes than `--nnodes` asks for came within `join_timeout` of --rdzv-conf"
    said = [str(each).strip().partition("\n")[0].rstrip(".") for each in (error, error.__cause__) if each is not None]
    network = isinstance(error, (RendezvousError, DistNetworkError))
    return ". ".join([*said, _OTHER_PORT] if network else said[:1])


def _given(torchrun: Sequence[str]) -> set[str]:
    """Return the options in effect, from the command line or from variables that torchrun reads: `PET_NNODES` and so on."""
    of_environment = {name[4:].lower().replace("_", "-") for name in os.environ if name.startswith("PET_")}
    return {option.partition("=")[0] for option in torchrun} | {f"--{name}" for name in of_environment}


def _rendezvous(given: set[str]) -> list[str]:
    """Return torchrun's own additions: a place to meet for one node, or the intended kind of meeting."""
    if "--rdzv-backend" in given and "--standalone" not in given:
        return []
    if "--standalone" in given or not given & {"--rdzv-endpoint", "--master-addr", "--master-port", "--node-rank"}:
        return [
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", str(uuid.uuid4())),
            *("--local-addr", "127.0.0.1"),
        ]
    if "--node-rank" in given or "--rdzv-endpoint" not in given:
        return ["--rdzv-backend", "static", *([] if "--master-port" in given else ["--master-port", "29500"])]
    return ["--rdzv-backend", "c10d"]


def _say(sentence: str) -> None:
    sys.stderr.write(f"moe-ckpt: {sentence}\n")
    sys.stderr.flush()
