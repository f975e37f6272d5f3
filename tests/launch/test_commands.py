"""The commands and manifests in launch/: flags, settings and keys are known, and they run where they can.

The scripts of the manifests run as they are, one process per node. Commands of a cluster that a single
machine lacks are replaced by stubs: `getent` knows every node's name, and the nodes are 127.0.0.1, 127.0.0.2,
...

Kubernetes' own kinds are checked against the schemas in kubernetes-validate; JobSet and TrainJob against the
models of kubeflow-trainer-api, which are made from their CRDs.
"""

import copy
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models
from support.jobs import ROOT, Start, command, final_hash, free_port

from anynode.command import torchrun_options
from mingpt.config.cli import parse

LAUNCH = ROOT / "launch"
KUBERNETES = [f"kubernetes/{path.name}" for path in sorted((LAUNCH / "kubernetes").glob("*.yaml"))]
MANIFESTS = [*KUBERNETES, "skypilot.yaml"]
ONCE_A_WEEK = ["kubernetes/indexed_job.yaml", "kubernetes/trainjob.yaml"]
VALUES = {"--nnodes": "1:2", "--nproc": "2", "--rdzv": "127.0.0.1:29400", "--local_addr": "127.0.0.1"}
CUSTOM = {"JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob}
API_VERSIONS = {"JobSet": "jobset.x-k8s.io/v1alpha2", "TrainJob": "trainer.kubeflow.org/v1alpha1"}
OLDEST, NEWEST = "1.31", kubernetes_validate.latest_version()


def resources(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


def with_key(value: Any, key: str) -> Iterator[dict[str, Any]]:
    """Yield each mapping that has `key`, in `value` or below it."""
    if isinstance(value, dict) and key in value:
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    for each in inner:
        yield from with_key(each, key)


def script_of(name: str) -> tuple[str, dict[str, str]]:
    """(the shell script of a manifest, the environment that the manifest itself sets)."""
    for task in with_key(resources(name), "run"):
        return task["run"], {key: value or "" for key, value in task["envs"].items()}
    container, *_ = with_key(resources(name), "args")
    assert container["command"] == ["bash", "-euc"]
    (script,) = container["args"]
    return script, {entry["name"]: entry.get("value", "") for entry in container["env"]}


SHELL = [path for path in sorted(LAUNCH.rglob("*")) if path.suffix in (".sh", ".sbatch")]
SCRIPTS = {str(path.relative_to(LAUNCH)): path.read_text() for path in SHELL}
SCRIPTS |= {name: script_of(name)[0] for name in MANIFESTS}


# Manifests


def places(value: Any, place: str = "") -> set[str]:
    """The places of all values in `value`."""
    found, inner = {place}, dict(enumerate(value)) if isinstance(value, list) else value
    for key in inner if isinstance(inner, dict) else ():
        found |= places(inner[key], f"{place}/{key}")
    return found


@pytest.mark.parametrize("name", KUBERNETES)
def test_a_manifest_passes_its_schema(name: str) -> None:
    """As its own checker does: Kubernetes' API server, with `--validate=strict`."""
    for resource in resources(name):
        kind = resource["kind"]
        if kind in CUSTOM:
            assert resource["apiVersion"] == API_VERSIONS[kind]
            read = CUSTOM[kind].from_dict(copy.deepcopy(resource))
            assert read is not None and places(resource) <= places(read.to_dict())  # it allows unknown keys
        else:
            kubernetes_validate.validate(resource, OLDEST, strict=True)
            kubernetes_validate.validate(resource, NEWEST, strict=True)


# Commands


def commands(script: str) -> list[str]:
    """The lines of a shell script; a line that ends with a backslash continues."""
    lines = re.sub(r"\\\n\s*", " ", script).splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def with_values(words: list[str]) -> list[str]:
    """The words as the shell would expand them."""
    words = [
        VALUES.get(before, "name") if "$" in word and before in (*VALUES, "--rdzv_id") else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in words]
    return [re.sub(r"\$\w+", "name", word) for word in words if word != "$@"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_parses_and_its_flags_and_settings_are_known(name: str) -> None:
    done = subprocess.run(["bash", "-n"], input=SCRIPTS[name], text=True, capture_output=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = [line.partition(" #")[0] for line in commands(SCRIPTS[name])]
    for line in lines:
        _, is_elastic, elastic_words = line.partition("launch/elastic.sh")
        if is_elastic and name != "elastic.sh":  # there it is the script's own usage
            words = with_values(shlex.split(elastic_words.removesuffix("&")))
            *_, script_words = torchrun_options(words)
            parse(script_words[script_words.index("train.py") + 1 :])
        elif "python train.py" in line:
            settings = shlex.split(line.partition("train.py")[2].partition("|")[0].removesuffix(")"))
            parse([word for word in settings if "=" in word])
    trains = any(("train.py" in line or "node.sh" in line) and "--print_config" not in line for line in lines)
    assert trains or name in ("elastic.sh", "notice.sh")


def write_getent(folder: Path, hosts: Mapping[str, str]) -> None:
    """Write a `getent` that knows these names and their addresses."""
    lines = "\n".join(f'{name}) echo "{address}    $2";;' for name, address in hosts.items())
    (folder / "getent").write_text(f"#!/bin/bash\ncase $2 in\n{lines}\n*) exit 2;;\nesac\n")
    (folder / "getent").chmod(0o755)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.weekly] * (one in ONCE_A_WEEK)) for one in MANIFESTS]
)
def test_the_script_of_a_manifest_trains_on_two_nodes(
    name: str, start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Host names are replaced by addresses, since there is no name server of a cluster."""
    script, environment = script_of(name)
    pattern = "mingpt-%g.mingpt" if "indexed" in name else "mingpt-node-0-%g.mingpt"
    hosts = {pattern.replace("%g", str(node)): f"127.0.0.{node + 1}" for node in range(2)}
    write_getent(tmp_path, hosts)
    port, words = free_port(), " ".join(command(run_dir=tmp_path / "run", data__path=text)[2:])
    assert script.count("configs/gpt2.yaml run_dir=") == 1 and "29400" in script
    script = re.sub(r"configs/gpt2.yaml run_dir=\S+", words, script).replace("29400", str(port))
    script = script.replace(f"'{pattern}:{port}'", f"'127.0.0.%g:{port}'").replace("cd /workspace\n", "")
    script = script.replace(" 0 $((HOSTS - 1))", " 1 $HOSTS")
    environment |= dict.fromkeys(("HOSTS", "MIN_NODES", "MAX_NODES", "SKYPILOT_NUM_NODES"), "2")
    environment |= {"NPROC": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "HOME": str(tmp_path), "PET_NNODES": "7"}
    environment |= {"SKYPILOT_NODE_IPS": "\n".join(hosts.values()), "SKYPILOT_TASK_ID": "sky-1"}
    environment |= {"SNAPSHOTS": str(tmp_path / "snapshots")}
    environment |= {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    jobs = []
    for node, (host, address) in enumerate(hosts.items()):
        own = {"POD_IP": address, "HOSTNAME": host.partition(".")[0], "SKYPILOT_NODE_RANK": str(node)}
        jobs.append(start(["bash", "-euc", script], **environment | own))
    for job in jobs:
        assert job.wait() == 0, job.err()
    if name == "skypilot.yaml":
        (tmp_path / "run" / "snapshots").symlink_to(tmp_path / "snapshots")
    assert final_hash(tmp_path / "run") == final_hash(undisturbed)
