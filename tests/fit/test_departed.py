"""What a rank says when another one is gone, and that lines say which rank they are of, once."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from launcher import run_world

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange, Neighbours
from lightning_moe_ckpt.fit._stops import say_who_is_gone
from lightning_moe_ckpt.parallel import build_groups

OF_COLLECTIVE = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Heard(logging.Handler):
    """The lines that handlers of the root logger get."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    @classmethod
    def of_all(cls) -> Heard:
        heard = cls()
        root = logging.getLogger()
        root.handlers = [heard]
        logging.getLogger("lightning_moe_ckpt").setLevel(logging.INFO)
        return heard


def test_a_dead_rank_is_one_sentence_of_one_survivor() -> None:
    """A killed process is told from one that lives, also as a zombie; the error of a collective alone is no proof of which."""

    def work(rank: int) -> tuple[list[list[int]], list[str]]:
        heard = Heard.of_all()
        exchange = Exchange(build_groups())
        with subprocess.Popen(["sleep", "60"]) as stand_in:  # the process of rank 1; ours has to go on talking
            with mock.patch.object(os, "getpid", return_value=stand_in.pid if rank == 1 else os.getppid()):
                neighbours = Neighbours(exchange)
            gone = [neighbours.gone(0.0)]
            say_who_is_gone(neighbours, 36, ValueError("of the user's own"))
            say_who_is_gone(neighbours, 36, OF_COLLECTIVE)
            exchange.gather([0])
            if rank == 1:
                stand_in.send_signal(signal.SIGKILL)
            gone.append(neighbours.gone(30.0))
            say_who_is_gone(neighbours, 36, OF_COLLECTIVE)
            say_who_is_gone(neighbours, None, OF_COLLECTIVE)
            os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3"
            say_who_is_gone(neighbours, 36, OF_COLLECTIVE)
            exchange.gather([0])
            stand_in.kill()
        return gone, heard.lines

    found = run_world(3, work)
    assert [gone for gone, _ in found] == [[[], [1]]] * 3
    assert found[0][1] == [
        "[rank 0] another rank is gone, or does not answer; start this job again, it goes on from step 36 or a newer one",
        "[rank 0] rank 1 is gone; start this job again, it goes on from step 36 or a newer one",
        "[rank 0] rank 1 is gone; nothing was whole on all ranks yet, the next start of this job begins anew",
        "[rank 0] rank 1 is gone; training starts again from step 36 or a newer one",
    ]
    assert found[1][1] == found[2][1] == [], "the first rank of a node that lives speaks for it"


def test_lines_say_their_rank_and_what_all_say_alike_is_said_once() -> None:
    """The rank stands before the message, whatever the format of the user's handlers; one process says none."""

    def work(rank: int) -> list[str]:
        heard = Heard.of_all()
        log = rank_logger("lightning_moe_ckpt.made_up")
        log.warning("of step %d", rank)
        log.info("the same", alike=True)
        log.debug("not asked for")
        return heard.lines

    assert run_world(3, work) == [
        ["[rank 0] of step 0", "[rank 0] the same"],
        ["[rank 1] of step 1"],
        ["[rank 2] of step 2"],
    ]
    assert run_world(1, work, process_group=False) == [["of step 0", "the same"]]


@pytest.mark.parametrize("root", [True, False], ids=["root handler", "no handler"])
def test_a_line_is_written_once(root: bool, tmp_path: Path) -> None:
    """Beside the handlers that Lightning gives to its own loggers, with and without one of the root logger; the place is the caller's."""

    def work(_: int) -> None:
        descriptor = os.open(tmp_path / "said", os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 2)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        logging.getLogger().handlers = []
        if root:
            logging.basicConfig(format="%(levelname)s %(filename)s %(message)s", force=True)
        if root:  # Lightning's own, which it leaves out where the root logger has one as it is imported
            logging.getLogger("lightning.pytorch").handlers = [logging.StreamHandler()]
        rank_logger("lightning_moe_ckpt.made_up").warning("once")

    run_world(1, work, process_group=False)
    assert (tmp_path / "said").read_text() == (f"WARNING {Path(__file__).name} once\n" if root else "once\n")


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", ["torchrun", "Lightning"])
def test_the_sentence_comes_before_any_traceback(launcher: str, tmp_path: Path) -> None:
    """Real launchers, real SIGKILL of rank 1; the digits of `examples/`."""
    program = "import os, sys, digits\nprint('pid', os.environ.get('LOCAL_RANK', '0'), os.getpid(), flush=True)\ndigits.main()"
    (tmp_path / "train.py").write_text(program)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if launcher == "torchrun" else []
    options = {"trainer.devices": 2, "trainer.max_steps": 100_000, "trainer.enable_progress_bar": "false"}
    options |= {"trainer.logger": "false", "trainer.callbacks.init_args.url": tmp_path / "run"}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, *torchrun, "train.py", "fit", f"--config={EXAMPLES / 'digits.yaml'}", *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{EXAMPLES}:{EXAMPLES.parent}", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONWARNINGS": "ignore", "MOE_CKPT_SHARED_MEMORY": str(tmp_path)}
    said = ""
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        assert job.stdout is not None
        try:
            while not (pid := re.search(r"pid 1 (\d+)", said)):
                said += job.stdout.readline()
            while not list((tmp_path / "run" / "snap").glob("000000000008/*/_COMMITTED")):
                assert job.poll() is None
            os.kill(int(pid[1]), signal.SIGKILL)
            said += job.stdout.read()
        finally:
            job.kill()
    before, _, after = said.partition("Traceback")
    assert re.search(r"rank 1 is gone; start this job again, it goes on from step \d+ or a newer one", before), said
    assert after
    assert said.count("is gone;") == 1
