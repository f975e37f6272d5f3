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
from typing import Any

import pytest
import yaml
from conftest import ROOT, SMALL, Start, final_hash
from support.jobs import free_port

from anynode.command import torchrun_options
from mingpt.config.cli import parse

LAUNCH = ROOT / "launch"
SHELL = [path for path in sorted(LAUNCH.rglob("*")) if path.suffix in (".sh", ".sbatch")]
MANIFESTS = ["kubernetes/jobset.yaml", "skypilot.yaml"]
OTHER_MANIFESTS = ["kubernetes/indexed_job.yaml", "kubernetes/trainjob.yaml"]  # run once a week


def script_of(name: str) -> tuple[str, dict[str, str]]:
    """(the shell script of a manifest, the environment that the manifest itself sets)."""
    for resource in yaml.safe_load_all((LAUNCH / name).read_text()):
        if "run" in resource:
            return resource["run"], {key: value or "" for key, value in resource["envs"].items()}
        container = find_container(resource)
        if container:
            assert container["command"] == ["bash", "-euc"]
            (script,) = container["args"]
            return script, {entry["name"]: entry.get("value", "") for entry in container["env"]}
    raise AssertionError(f"{name} has no script")


def find_container(value: Any) -> dict[str, Any] | None:
    """The first mapping that has the key args."""
    if isinstance(value, dict) and "args" in value:
        return value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return next((found for each in inner if (found := find_container(each)) is not None), None)


def commands(script: str) -> list[str]:
    """The lines of a shell script; a line that ends with a backslash continues."""
    lines = re.sub(r"\\\n\s*", " ", script).splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def launches(script: str) -> list[list[str]]:
    """The words after launch/elastic.sh of the commands that call it, variables unexpanded."""
    found = [line for line in commands(script) if "launch/elastic.sh" in line]
    return [shlex.split(line.partition("launch/elastic.sh")[2].removesuffix("&")) for line in found]


def scripts() -> dict[str, str]:
    found = {str(path.relative_to(LAUNCH)): path.read_text() for path in SHELL}
    return found | {name: script_of(name)[0] for name in MANIFESTS + OTHER_MANIFESTS}


VALUES = {"--nnodes": "1:2", "--nproc": "2", "--rdzv": "127.0.0.1:29400", "--local_addr": "127.0.0.1"}


def with_values(words: list[str]) -> list[str]:
    """The words as the shell would expand them."""
    words = [
        VALUES.get(before, "name") if "$" in word and before in (*VALUES, "--rdzv_id") else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in words]
    return [re.sub(r"\$\w+", "name", word) for word in words if word != "$@"]


@pytest.mark.parametrize(("name", "script"), scripts().items(), ids=scripts())
def test_every_script_parses_and_its_flags_and_settings_are_known(name: str, script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    for words in launches(script):
        if name == "elastic.sh":
            continue  # this is the script's own usage
        *_, script_words = torchrun_options(with_values(words))
        parse(script_words[script_words.index("train.py") + 1 :])
    for line in commands(script):
        if re.search(r"python train\.py", line):
            settings = shlex.split(line.partition("train.py")[2].partition("|")[0].removesuffix(")"))
            parse([word for word in settings if "=" in word])
    lines = [line.partition(" #")[0] for line in commands(script) if "--print_config" not in line]
    assert name in ("elastic.sh", "notice.sh") or any(
        "train.py" in line or "node.sh" in line for line in lines
    )


def test_the_commands_of_the_page_on_clusters_are_those_of_the_recipes() -> None:
    blocks = re.findall(
        r"^```bash\n(.*?)^```$", (ROOT / "docs/clusters.md").read_text(), re.MULTILINE | re.DOTALL
    )
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert len(lines) >= 10
    for words in lines:
        for word in words:
            assert not word.startswith("launch/") or (ROOT / word).is_file(), word
        if words[0] == "launch/elastic.sh":
            words[words.index("--local_addr") + 1] = "127.0.0.1"
            *_, script_words = torchrun_options(words[1:])
            parse(script_words[script_words.index("train.py") + 1 :])
        elif "sbatch" in words[:2]:  # the first word may set a variable
            script = next(number for number, word in enumerate(words) if word.endswith(".sbatch"))
            parse(words[script + 1 :])


def write_stubs(folder: Path, hosts: Mapping[str, str]) -> Path:
    """Write the stubs into a folder for PATH, and return the folder."""
    folder.mkdir()
    lines = "\n".join(f'{name}) echo "{address}    $2";;' for name, address in hosts.items())
    (folder / "getent").write_text(f"#!/bin/bash\ncase $2 in\n{lines}\n*) exit 2;;\nesac\n")
    (folder / "getent").chmod(0o755)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*MANIFESTS, *(pytest.param(name, marks=pytest.mark.weekly) for name in OTHER_MANIFESTS)]
)
def test_the_script_of_a_manifest_trains_on_two_nodes(
    name: str, start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Host names are replaced by addresses, since there is no name server of a cluster."""
    script, environment = script_of(name)
    pattern = "mingpt-%g.mingpt" if "indexed" in name else "mingpt-node-0-%g.mingpt"
    names = [pattern.replace("%g", str(node)) for node in range(2)]
    addresses = ["127.0.0.1", "127.0.0.2"]
    stubs = write_stubs(tmp_path / "stubs", dict(zip(names, addresses, strict=True)))
    port = str(free_port())
    settings = SMALL | {"run_dir": tmp_path / "run", "data.path": text}
    words = " ".join(f"{key}={value}" for key, value in settings.items())
    assert script.count("configs/gpt2.yaml run_dir=") == 1 and "29400" in script
    script = re.sub(r"configs/gpt2.yaml run_dir=\S+", words, script).replace("29400", port)
    script = script.replace(f"'{pattern}:{port}'", f"'127.0.0.%g:{port}'").replace(
        " 0 $((HOSTS - 1))", " 1 $HOSTS"
    )
    script = script.replace("cd /workspace\n", "")
    jobs = []
    for node, address in enumerate(addresses):
        given = environment | {
            "HOSTS": "2",
            "MIN_NODES": "2",
            "MAX_NODES": "2",
            "NPROC": "1",
            "HOME": str(tmp_path),
        }
        given |= {"POD_IP": address, "HOSTNAME": names[node].partition(".")[0], "PET_NNODES": "7"}
        given |= {"SKYPILOT_NODE_RANK": str(node), "SKYPILOT_NODE_IPS": "\n".join(addresses)}
        given |= {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_TASK_ID": "sky-1"}
        given |= {"SNAPSHOTS": str(tmp_path / "snapshots")}
        path = f"{stubs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        jobs.append(start(["bash", "-euc", script], PATH=path, **given))
    for job in jobs:
        assert job.wait() == 0, job.err()
    if name == "skypilot.yaml":
        (tmp_path / "run" / "snapshots").symlink_to(tmp_path / "snapshots")
    assert final_hash(tmp_path / "run") == final_hash(undisturbed)


def test_a_pod_waits_until_its_name_stands_for_its_own_address(start: Start, tmp_path: Path) -> None:
    """A name server may still give the address of the pod that was there before."""
    script, environment = script_of("kubernetes/indexed_job.yaml")
    stubs = write_stubs(tmp_path / "stubs", {"mingpt-0.mingpt": "127.0.0.9"})
    (stubs / "sleep").write_text("#!/bin/bash\necho waited >&2\nexit 7\n")
    (stubs / "sleep").chmod(0o755)
    given = environment | {"POD_IP": "127.0.0.1", "HOSTNAME": "mingpt-0"}
    job = start(["bash", "-euc", script], PATH=f"{stubs}:{os.environ['PATH']}", **given)
    assert job.wait(30) == 7 and "waited" in job.err() and "torch.distributed.run" not in job.err()
