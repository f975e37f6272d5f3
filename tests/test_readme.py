"""Every command of the README runs, shortened by overrides; the installs are run by .ci/run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, environment, free_port

BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines()]
SHORT = {key: value for key, value in SMALL.items() if key not in ("data.block_size", "snapshot.every")} | {
    "data.block_size": 16,
    "data.sha256": "null",
}


def shortened(line: str, text: Path) -> list[str]:
    """The commands of a line, one for each node; overrides stand in front, so that what the README sets itself wins."""
    line, _, remark = line.partition("#")
    words = line.split("&&")[-1].split()
    if words[0] == "pytest":
        return []  # this is it
    if "mingpt.verify" in words:
        words += ["--kills", "1", "--workers", "1"]
    if "train.py" in words and not {"--help", "--print_config"} & set(words):
        said = {word.partition("=")[0] for word in words}
        short = SHORT | {"trainer.max_steps": 2} | ({"data.path": text} if "data.path" not in said else {})
        words += [f"{key}={value}" for key, value in short.items() if key not in said]
        words = [re.sub(r"max_steps=\d+", "max_steps=3", word) for word in words]
    elif "sample.py" in words:
        words = [re.sub("^300$", "20", word) for word in words]
    words = [{"torchrun": f"{sys.executable} -m torch.distributed.run", "python": sys.executable}.get(word, word) for word in words]
    return [" ".join(words)] * (2 if "on both nodes" in remark else 1)


@pytest.mark.xdist_group("readme")
def test_every_command_of_the_readme_runs(text: Path, tmp_path: Path) -> None:
    """In the order of the page, in a folder of their own, since later commands use what earlier ones wrote."""
    assert len(LINES) > 12
    for name in ("train.py", "sample.py", "mingpt", "configs", "data", "gpt2_train_cfg.yaml"):
        (tmp_path / name).symlink_to(ROOT / name)
    for line in LINES:
        port = str(free_port())
        running = [
            subprocess.Popen(command.replace("29400", port), shell=True, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             env=environment(HOST="localhost", NODE=str(node)))
            for node, command in enumerate(shortened(line, text))
        ]  # fmt: skip
        for process in running:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, f"{line}\n{out[-2000:]}\n{err[-3000:]}"
    assert (tmp_path / "out/default/loss.png").exists()


def test_every_file_that_the_tour_names_is_there_and_every_module_is_named() -> None:
    page = (ROOT / "README.md").read_text()
    named = {name for name in re.findall(r"`([\w/]+\.(?:py|yaml|sbatch|txt))`", page) if "/" in name or name.endswith(".py")}
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert [path.name for path in (ROOT / "mingpt").glob("*.py") if path.name != "__init__.py" and f"`mingpt/{path.name}`" not in page] == []
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_the_table_of_speeds_is_the_one_made_from_the_results() -> None:
    done = subprocess.run([sys.executable, "benchmarks/table.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout in (ROOT / "README.md").read_text()
