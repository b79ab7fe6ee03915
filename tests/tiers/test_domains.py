"""What fails together is found, named by the environment, or given."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.tiers import FailureDomain, _holders, this_domain
from lightning_moe_ckpt.tiers._holders import expect_domains


def test_a_machine_is_one_node_by_its_boot_id() -> None:
    """Containers have host names of their own but die with their machine."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    assert this_domain({}) == FailureDomain(node=boot_id, host="any")
    assert this_domain({}).host == socket.gethostname()


def test_a_machine_without_boot_id_is_its_host_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on macOS."""
    monkeypatch.setattr(_holders, "_BOOT_ID", tmp_path / "none")
    assert this_domain({}).node == socket.gethostname()


def test_a_directory_for_shared_memory_is_a_node_of_its_own(tmp_path: Path) -> None:
    """Processes that share one are one node, by whatever path they name it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to("a")
    a, b, link = (this_domain({"MOE_CKPT_SHARED_MEMORY": str(tmp_path / name)}) for name in ("a", "b", "link"))
    assert a == link
    assert len({a, b, this_domain({})}) == 3


def test_the_environment_says_better(tmp_path: Path) -> None:
    """Over what is found."""
    variables = {
        "MOE_CKPT_NODE": "gpu-17",
        "MOE_CKPT_RACK": "row-3",
        "MOE_CKPT_SHARED_MEMORY": str(tmp_path),
        "SLURM_TOPOLOGY_ADDR": "s0.s4.gpu-9",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
    }
    assert this_domain(variables) == FailureDomain(node="gpu-17", rack="row-3")


@pytest.mark.parametrize(
    ("address", "pattern", "rack"),
    [
        ("s0.s4.gpu-9", "switch.switch.node", "s0.s4"),
        ("leaf.gpu-9.example.org", "switch.node", "leaf"),
        ("gpu-9", "node", ""),
        ("", "", ""),
        ("block1", "block", ""),
    ],
)
def test_slurm_names_the_switch(address: str, pattern: str, rack: str) -> None:
    """All but the node, counted by the pattern, since host names have dots too; without a topology there is no rack."""
    assert this_domain({"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}).rack == rack


def test_given_domains_are_one_per_rank() -> None:
    """Else an error that says both numbers."""
    given = [FailureDomain(node="a"), FailureDomain(node="b")]
    assert expect_domains(given, 2) == tuple(given)
    with pytest.raises(ConfigurationError, match=r"names 2 ranks, the run has 3.*MOE_CKPT_NODE"):
        expect_domains(given, 3)


def test_a_node_has_a_name() -> None:
    """An empty one would be everybody's."""
    with pytest.raises(ConfigurationError, match="must name a node"):
        FailureDomain(node="")
