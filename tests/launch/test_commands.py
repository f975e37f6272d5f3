"""Every command in launch/ parses, its flags and settings are known, and it runs if it can run here.

The scripts of the manifests run as they are, one process per node. Commands of a cluster that a single
machine lacks are replaced by stubs: `getent` knows every node's name, and the nodes are 127.0.0.1, 127.0.0.2,
...
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import ROOT, Start, command, final_hash
from support.jobs import free_port
from support.manifests import LAUNCH, MANIFESTS, script_of

from anynode.command import torchrun_options
from mingpt.config.cli import parse

SHELL = [path for path in sorted(LAUNCH.rglob("*")) if path.suffix in (".sh", ".sbatch")]
SCRIPTS = {str(path.relative_to(LAUNCH)): path.read_text() for path in SHELL}
SCRIPTS |= {name: script_of(name)[0] for name in MANIFESTS}
ONCE_A_WEEK = ["kubernetes/indexed_job.yaml", "kubernetes/trainjob.yaml"]
VALUES = {"--nnodes": "1:2", "--nproc": "2", "--rdzv": "127.0.0.1:29400", "--local_addr": "127.0.0.1"}


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


def check_elastic(words: list[str]) -> None:
    """Check the words after launch/elastic.sh: its options, and the settings of train.py."""
    *_, script_words = torchrun_options(words)
    parse(script_words[script_words.index("train.py") + 1 :])


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_parses_and_its_flags_and_settings_are_known(name: str) -> None:
    done = subprocess.run(["bash", "-n"], input=SCRIPTS[name], text=True, capture_output=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = [line.partition(" #")[0] for line in commands(SCRIPTS[name])]
    for line in lines:
        _, is_elastic, elastic_words = line.partition("launch/elastic.sh")
        if is_elastic and name != "elastic.sh":  # there it is the script's own usage
            check_elastic(with_values(shlex.split(elastic_words.removesuffix("&"))))
        elif "python train.py" in line:
            settings = shlex.split(line.partition("train.py")[2].partition("|")[0].removesuffix(")"))
            parse([word for word in settings if "=" in word])
    trains = any(("train.py" in line or "node.sh" in line) and "--print_config" not in line for line in lines)
    assert trains or name in ("elastic.sh", "notice.sh")


def test_the_commands_of_the_page_on_clusters_are_those_of_the_recipes() -> None:
    page = (ROOT / "docs/clusters.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert len(lines) >= 10
    for words in lines:
        missing = [word for word in words if word.startswith("launch/") and not (ROOT / word).is_file()]
        assert missing == []
        if words[0] == "launch/elastic.sh":
            words[words.index("--local_addr") + 1] = "127.0.0.1"
            check_elastic(words[1:])
        elif "sbatch" in words[:2]:  # the first word may set a variable
            script = next(number for number, word in enumerate(words) if word.endswith(".sbatch"))
            parse(words[script + 1 :])


def write_stub(folder: Path, name: str, code: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{code}\n")
    (folder / name).chmod(0o755)


def write_hosts(folder: Path, hosts: Mapping[str, str]) -> None:
    """Write a `getent` that knows these names and their addresses."""
    lines = "\n".join(f'{name}) echo "{address}    $2";;' for name, address in hosts.items())
    write_stub(folder, "getent", f"case $2 in\n{lines}\n*) exit 2;;\nesac")


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
    write_hosts(tmp_path / "stubs", hosts)
    port, words = free_port(), " ".join(command(run_dir=tmp_path / "run", data__path=text)[2:])
    assert script.count("configs/gpt2.yaml run_dir=") == 1 and "29400" in script
    script = re.sub(r"configs/gpt2.yaml run_dir=\S+", words, script).replace("29400", str(port))
    script = script.replace(f"'{pattern}:{port}'", f"'127.0.0.%g:{port}'").replace("cd /workspace\n", "")
    script = script.replace(" 0 $((HOSTS - 1))", " 1 $HOSTS")
    environment |= dict.fromkeys(("HOSTS", "MIN_NODES", "MAX_NODES", "SKYPILOT_NUM_NODES"), "2")
    environment |= {"NPROC": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "HOME": str(tmp_path), "PET_NNODES": "7"}
    environment |= {"SKYPILOT_NODE_IPS": "\n".join(hosts.values()), "SKYPILOT_TASK_ID": "sky-1"}
    environment |= {"SNAPSHOTS": str(tmp_path / "snapshots")}
    environment |= {"PATH": f"{tmp_path}/stubs:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    jobs = []
    for node, (host, address) in enumerate(hosts.items()):
        own = {"POD_IP": address, "HOSTNAME": host.partition(".")[0], "SKYPILOT_NODE_RANK": str(node)}
        jobs.append(start(["bash", "-euc", script], **environment | own))
    for job in jobs:
        assert job.wait() == 0, job.err()
    if name == "skypilot.yaml":
        (tmp_path / "run" / "snapshots").symlink_to(tmp_path / "snapshots")
    assert final_hash(tmp_path / "run") == final_hash(undisturbed)


def test_a_pod_waits_until_its_name_stands_for_its_own_address(start: Start, tmp_path: Path) -> None:
    """A name server may still give the address of the pod that was there before."""
    script, environment = script_of("kubernetes/indexed_job.yaml")
    write_hosts(tmp_path / "stubs", {"mingpt-0.mingpt": "127.0.0.9"})
    write_stub(tmp_path / "stubs", "sleep", "echo waited >&2\nexit 7")
    environment |= {"POD_IP": "127.0.0.1", "HOSTNAME": "mingpt-0"}
    job = start(["bash", "-euc", script], PATH=f"{tmp_path}/stubs:{os.environ['PATH']}", **environment)
    assert job.wait(30) == 7 and "waited" in job.err() and "torch.distributed.run" not in job.err()
