"""Pipeline stages: a rank of one dies, the job starts again, and ends the same on every rank of every stage."""

from __future__ import annotations

import signal
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from campaign._campaign import Campaigns, checkpoints
from campaign._nodes import Nodes
from campaign._partial_runs import KILL, Machines, restarts, two_level_setup
from campaign._pipelined import Pipelined, PipelinedModule, Stage, draw
from campaign._training import Checkpointing
from campaign.test_expert_parallel import random_kills
from campaign.test_in_place import check_killed
from campaign.test_peers import train_with_copies_only
from lightning_moe_ckpt.inspection import export, verify
from lightning_moe_ckpt.storage import open_backend
from lightning_moe_ckpt.testing import Kill

DENSE = Checkpointing(policy="dense", every_n_steps=2)
SPARSE = Checkpointing(policy="sparse", window=3, order="popularity")


@pytest.mark.parametrize(
    ("stages", "replicas", "expert_parallel", "checkpointing"),
    [
        (2, 1, 1, DENSE),
        (3, 1, 1, SPARSE),
        pytest.param(2, 2, 1, SPARSE, marks=pytest.mark.soak),
        pytest.param(2, 2, 2, SPARSE, marks=pytest.mark.soak),  # an ordinary run draws one that is spread so
    ],
)
def test_killed_on_random_ranks_stages_end_the_same(
    campaigns: Campaigns, stages: int, replicas: int, expert_parallel: int, checkpointing: Checkpointing
) -> None:
    """Several kills in one run, on ranks of several stages; schedulers follow what the last stage alone computes."""
    setup = Pipelined(
        stages=stages,
        micro_batches=4 if stages > 2 else 2,
        world_size=stages * replicas,
        expert_parallel=expert_parallel,
        scheduler="plateau",
        checkpointing=checkpointing,
    )
    lives = campaigns.check(setup, *random_kills(setup, 2, seed=10 * stages + replicas + expert_parallel))
    assert lives[-1].steps()[0] > 1, "it did not start over"


@pytest.mark.parametrize(
    ("stages", "replicas", "expert_parallel", "policy"),
    [
        (2, 1, 1, "differential"),
        pytest.param(2, 2, 2, "differential", marks=pytest.mark.soak),
    ],
)
def test_differences_of_stages_lead_back_to_the_same_bits(
    campaigns: Campaigns, stages: int, replicas: int, expert_parallel: int, policy: str
) -> None:
    """Bases and differences of all stages are of the same steps."""
    setup = Pipelined(
        stages=stages,
        world_size=stages * replicas,
        expert_parallel=expert_parallel,
        checkpointing=Checkpointing(policy="differential", every_n_steps=5, batch=2),
    )
    campaigns.check(setup, *random_kills(setup, 2, seed=stages + replicas))


@pytest.mark.parametrize(
    ("stages", "ep_size", "policy"),
    [
        (2, 1, "partial"),
        pytest.param(2, 2, "selective", marks=pytest.mark.soak),  # `test_selective.py` has it without stages
        pytest.param(3, 1, "partial", marks=pytest.mark.soak),
    ],
)
def test_experts_of_every_stage_are_as_old_as_promised(
    campaigns: Campaigns, folder: Path, stages: int, ep_size: int, policy: str
) -> None:
    """Each stage chooses among its own experts; what a restart finds of them is what was taken of each last."""
    plain = two_level_setup(stages * ep_size, ep_size)
    if policy == "selective":  # a stage's dense part, and some of its experts
        checkpointing = Checkpointing(policy="selective", keep=100, local_budget=120_000, remote_budget=100_000)
        plain = replace(plain, checkpointing=checkpointing)
    setup = Pipelined(
        **{field.name: getattr(plain, field.name) for field in fields(plain)},
        stages=stages,
        micro_batches=4 if stages > 2 else 2,
    )
    found = restarts(campaigns, setup, Machines(folder, (0,) * setup.world_size), KILL)
    promise = found.require(1)
    assert len(set(promise.experts.values())) > 1, "experts are of different ages"


@pytest.mark.parametrize(
    ("stages", "replicas", "expert_parallel", "kills"),
    [
        (2, 2, 1, (Kill(phase="forward", step=3, rank=3), Kill(phase="before_optimizer_step", step=6, rank=0))),
        pytest.param(
            *(3, 1, 1, (Kill(phase="after_backward", step=5, rank=1), Kill(phase="batch_start", step=8, rank=2))),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_rank_of_a_stage_is_replaced_and_the_others_go_on_in_place(
    campaigns: Campaigns, stages: int, replicas: int, expert_parallel: int, kills: tuple[Kill, ...]
) -> None:
    """Schedules and groups are made anew in processes that keep theirs."""
    setup = Pipelined(
        stages=stages,
        world_size=stages * replicas,
        expert_parallel=expert_parallel,
        micro_batches=4 if stages > 2 else 2,
        checkpointing=SPARSE,
    )
    lives = check_killed(campaigns, setup, *kills)
    assert len(lives) > 1


SEEDS = (18,)


@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(each, marks=pytest.mark.soak) for each in range(100) if each not in SEEDS)]
)
def test_a_drawn_run_in_stages_ends_as_if_nothing_had_happened(campaigns: Campaigns, seed: int) -> None:
    """However it is spread and trained, whatever it stores and wherever it dies."""
    setup, kills = draw(seed)
    campaigns.check(setup, *kills, must_strike=False)


def test_tools_see_one_model(campaigns: Campaigns, tmp_path: Path) -> None:
    """What stages and expert-parallel ranks have stored is whole, and is exported as the model that nobody cut."""
    setup = Pipelined(world_size=4, expert_parallel=2, validate_every=None, batches=4, epochs=1, checkpointing=SPARSE)
    (life,) = campaigns.run(setup)
    with closing(open_backend(checkpoints(life.workdir).as_uri())) as backend:
        assert verify(backend).sound
        done = export(backend, tmp_path / "whole.ckpt")
    assert done.step == setup.steps
    whole = PipelinedModule(setup, None)  # type: ignore[arg-type]
    whole.stage = Stage(0, 1, 4)
    found = torch.load(tmp_path / "whole.ckpt")
    whole.load_state_dict(found["state_dict"])
    ends = [life.end(rank) for rank in range(4)]
    for name, parameter in whole.named_parameters():
        own = [end[f"param/{name}"] for end in ends if f"param/{name}" in end]
        shared = torch.cat(own) if name.rpartition(".")[2] in {"w1", "b1", "w2", "b2"} else own[0]
        assert torch.equal(parameter, shared), name
    assert len(found["optimizer_states"][0]["state"]) == len(list(whole.parameters()))


@pytest.mark.parametrize(
    ("placed", "redundancy"),
    [
        ((0, 0, 1, 1), False),
        pytest.param((0, 1, 0, 1), True, marks=pytest.mark.soak),
        pytest.param((0, 0, 1, 1), True, marks=pytest.mark.soak),
    ],
    ids=["a node has a stage", "a node has half of each", "stages mirror nothing of each other"],
)
def test_a_node_of_a_stage_comes_back_from_the_other_one(
    campaigns: Campaigns, folder: Path, placed: tuple[int, ...], redundancy: bool
) -> None:
    """Copies may lie with another stage, which has nothing of them in its own state."""
    checkpointing = replace(DENSE, arguments=(("redundancy", redundancy),))
    setup, nodes = Pipelined(world_size=4, batches=6, checkpointing=checkpointing), Nodes(folder, placed, dies=1)
    kill = Kill(phase="forward", step=10, rank=placed.index(1))
    lives = campaigns.check(setup, kill, may_complain=True, fit=partial(train_with_copies_only, setup, nodes))
    assert " from peer (rank" in lives[-1].log()
    assert nodes.files() == []


def test_a_signal_to_one_rank_stops_all_stages_at_one_boundary(campaigns: Campaigns) -> None:
    """The stop rides on the exchange of a step, which all stages take part in."""
    setup = Pipelined(world_size=2, checkpointing=DENSE)
    stop = Kill(phase="forward", step=5, rank=1, signal=signal.SIGTERM)
    lives = campaigns.check(setup, stop)
    assert [life.outcome for life in lives] == ["stopped", "finished"]
    assert lives[1].steps()[0] == lives[0].steps()[-1] + 1, "no step is trained twice"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 130))
def test_a_drawn_run_in_stages_goes_on_in_place(campaigns: Campaigns, seed: int) -> None:
    """The dead alone are replaced. Before there is a generation, a stage that nobody has any more begins from its seed."""
    setup, kills = draw(seed)
    # Workers of a killed process end seconds later, and are counted as left behind.
    check_killed(campaigns, replace(setup, workers=0), *kills, same_seed=True, must_strike=False)
