"""The files for SLURM and Kubernetes in the pages are such as these would take, as far as that shows without a cluster.

Options of sbatch and srun are those of SLURM 26.11.0rc1, from `src/common/slurm_opt.c` at 284c3b95f08a. Fields and kinds are those of Kubernetes 1.37, taken from its OpenAPI
description as published in kubernetes-validate 1.37.0 (Apache License 2.0), without what no file of ours comes to.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml  # type: ignore[import-untyped]  # it has no types, and stubs are not a dependency
from _pages import ROOT, blocks

from lightning_moe_ckpt.cli import PROGRAM

CLUSTERS = ROOT / "docs" / "clusters.md"
SCHEMA: dict[str, Any] = json.loads((Path(__file__).parent / "apart" / "kubernetes-1.37.json").read_text())
KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list,
}  # fmt: skip
BOTH = """account acctg-freq autocomplete bb bbf begin chdir cluster cluster-constraint clusters comment consolidate-segments constraint
container container-id context contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot
dependency distribution error exclude exclusive export extra extra-node-info gpu-bind gpu-freq gpus gpus-per-node
gpus-per-socket gpus-per-task gres gres-flags help hint hold input job-name licenses mail-type mail-user mcs-label mem mem-bind
mem-per-cpu mem-per-gpu mem-update mincpus network nice no-kill nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu
ntasks-per-node ntasks-per-socket ntasks-per-tres oom-kill-step open-mode output overcommit oversubscribe parsable partition
prefer priority profile propagate qos quiet reboot reservation resources resv-ports runtime segment signal sockets-per-node
spread-job spread-segments stepmgr switches tasks-per-node test-only thread-spec threads-per-core time time-min tmp tres-bind
tres-per-task usage use-min-nodes verbose version wait wckey"""
SBATCH = """array batch export-file external get-user-env gid ignore-pbs kill-on-invalid-dep no-requeue requeue uid wait-all-nodes wrap"""
SRUN = """accel-bind async bcast bcast-exclude compress cpu-bind cpu_bind debugger-test disable-status epilog exact external-launcher
het-group ignore-signals immediate interactive jobid kill-on-bad-exit label mpi msg-timeout multi-prog no-allocate overlap
pack-group preserve-env prolog pty quit-on-interrupt relative send-libs slurmd-debug task-epilog task-prolog threads treewidth
unbuffered wait-for-children whole x11"""


def unknown_options(line: str, of_one: str) -> list[str]:
    """Return the long options of a line that there are not; all of ours are long."""
    words = [word for word in shlex.split(line) if word.startswith("-")]
    known = {*BOTH.split(), *of_one.split()}
    return [word for word in words if word.partition("=")[0].removeprefix("--") not in known]


def scripts() -> list[str]:
    return [text for text in blocks(CLUSTERS, "sh") if "#SBATCH" in text]


def manifests() -> list[dict[str, Any]]:
    found = [each for text in blocks(CLUSTERS, "yaml") for each in yaml.safe_load_all(text)]
    return [each for each in found if isinstance(each, dict) and "apiVersion" in each]


def complaints(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """Return what is not as a schema says; a field that it does not name is as wrong as one of another kind."""
    if "$ref" in schema:
        schema = SCHEMA[schema["$ref"]]
    if "oneOf" in schema:
        return min((complaints(value, each, where) for each in schema["oneOf"]), key=len)
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{where} is {value!r}, no {kind}"]
    if value not in schema.get("enum", [value]):
        return [f"{where} is {value!r}, none of {schema['enum']}"]
    if isinstance(value, list):
        return [
            said for n, each in enumerate(value) for said in complaints(each, schema.get("items", {}), f"{where}[{n}]")
        ]
    if not isinstance(value, dict) or "properties" not in schema:
        return []
    found = [f"{where} lacks {name}" for name in schema.get("required", []) if name not in value]
    found += [f"{where} has no {name}" for name in value if name not in schema["properties"]]
    return found + [
        said
        for name, each in value.items()
        for said in complaints(each, schema["properties"].get(name, {}), f"{where}.{name}")
    ]


def check_command(words: list[str]) -> click.Context:
    """Parse a command of ours. Raises `click.UsageError` if there is none such."""
    assert words[0] == "moe-ckpt"
    return PROGRAM.commands[words[1]].make_context(words[1], words[2:])


def test_options_of_slurm_exist() -> None:
    """Of every `#SBATCH` line and every `srun` in the pages; where there is a real `sbatch`, it is asked too."""
    assert scripts()
    for text in scripts():
        for line in re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE):
            assert unknown_options(line, SBATCH) == []
        if shutil.which("sbatch"):
            subprocess.run(["sbatch", "--test-only"], input=text, text=True, check=True, timeout=60)
    for page in (ROOT / "docs").rglob("*.md"):
        for text in blocks(page, "sh"):
            for line in re.findall(r"\bsrun ((?:--?[^ ]+ )*)", text):
                assert unknown_options(line, SRUN) == [], page
    assert unknown_options("--nodes=4 --ntask-per-node=1 -x", SBATCH) == ["--ntask-per-node=1", "-x"]


@pytest.mark.parametrize("text", scripts())
def test_the_script_of_a_job_starts_what_we_have(text: str, tmp_path: Path) -> None:
    """Run by a shell with SLURM's variables, and with an `srun` and a `scontrol` that only write down how they are called."""
    log = tmp_path / "calls"
    for name, body in {"srun": f'printf "%s\\n" "$*" >> {log}', "scontrol": "echo n7; echo n8"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "77", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[7-8]", "SLURM_CPUS_PER_TASK": "64"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["bash", "-eu", "-c", text], env={"PATH": path, **job}, check=True, timeout=20, cwd=tmp_path)
    calls = [check_command(shlex.split(line)) for line in log.read_text().splitlines()]
    assert [call.info_name for call in calls] == ["doctor", "run"]
    assert calls[0].params["cluster"]
    assert calls[1].params | {"nnodes": "2", "rdzv_endpoint": "n7:29400", "rdzv_id": "77"} == calls[1].params


def test_manifests_fit_the_schema_of_kubernetes() -> None:
    """Fields that do not exist would be dropped without a word, or refused."""
    assert {each["kind"] for each in manifests()} == {"Job", "Service"}
    for each in manifests():
        assert complaints(each, SCHEMA[each["kind"]], each["kind"]) == []
    wrong = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "spec": {"completions": "4", "template": {"spec": {"container": []}}},
    }
    assert complaints(wrong, SCHEMA["Job"], "Job") == [
        "Job.spec.completions is '4', no integer",
        "Job.spec.template.spec lacks containers",
        "Job.spec.template.spec has no container",
    ]


def test_pods_find_each_other_and_start_what_we_have() -> None:
    """The place to meet is the first pod's name below the service; the service selects the job's pods; mounts have volumes."""
    by_kind = {each["kind"]: each for each in manifests()}
    job, service = by_kind["Job"], by_kind["Service"]
    pod, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    commands = [check_command(each["command"]) for each in [*pod.get("initContainers", []), *pod["containers"]]]
    for call in commands:
        assert call.params["rdzv_endpoint"].partition(":")[0] == f"{name}-0.{pod['subdomain']}"
        assert int(call.params["nnodes"]) == job["spec"]["parallelism"]
    assert len({call.params["rdzv_id"] for call in commands}) == len(commands)
    volumes = {each["name"] for each in pod["volumes"]}
    assert {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]} <= volumes
