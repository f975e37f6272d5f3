"""Tensor and pipeline parallelism of the tutorial: the loss of one process, bytes as the page shows."""

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from support.forked import WAYS
from support.jobs import ROOT, free_port
from support.pages import TIMEOUT_S, blocks, command_of, commands, link_root, not_printed, start

FOLDER = ROOT / "tutorial"
PAGE, LOOKING = FOLDER / "splitting.md", FOLDER / "looking.md"
# A command of looking.md and what the page shows of its output.
LOOKS = re.findall(
    r"^```bash\n(.*?)^```\n\n```text\n(.*?)^```", LOOKING.read_text(), re.MULTILINE | re.DOTALL
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tutorial")


@pytest.fixture(scope="module", params=WAYS)
def runs(request: pytest.FixtureRequest, folder: Path) -> Mapping[str, str]:
    return {
        line.partition("tutorial.")[2]: request.param(line, folder)
        for line in [command_of(FOLDER / "1_single.py"), *commands(PAGE)]
    }


@pytest.mark.slow
def test_all_end_at_the_loss_of_one_process(runs: Mapping[str, str]) -> None:
    ends = {name: output.split("final loss ")[1] for name, output in runs.items() if "final loss" in output}
    whole = {name: float(loss) for name, loss in ends.items() if "--steps" not in name}
    assert whole == pytest.approx(dict.fromkeys(whole, whole["1_single"]), abs=1e-5)


@pytest.mark.slow
def test_the_page_shows_what_the_programs_print(runs: Mapping[str, str]) -> None:
    shown = "".join(text for language, _, text in blocks(PAGE) if language == "text")
    assert shown.count("\n") >= 15
    assert not_printed(shown, "\n".join(runs.values())) == []


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Future[str]]]:
    """What the commands of looking.md print. Two run at a time, because they wait for most of their time."""
    folder = tmp_path_factory.mktemp("looking")
    link_root(folder)
    for name in ("train.py", "gpt2_train_cfg.yaml"):
        (folder / name).symlink_to(ROOT / name)

    def look(command: str) -> str:
        job = start(command.strip().replace("\n", "; "), folder, free_port())
        return "".join(job.communicate(timeout=TIMEOUT_S))

    with ThreadPoolExecutor(2) as pool:
        yield {command: pool.submit(look, command) for command, _ in LOOKS}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), LOOKS, ids=[command.split()[-1] for command, _ in LOOKS])
def test_a_job_to_look_at_prints_what_the_page_shows(
    command: str, shown: str, looks: Mapping[str, Future[str]]
) -> None:
    """Numbers apart, and what the page leaves out. Most of these jobs fail: that is why one looks at them."""
    output = re.sub(r"\d+", "#", looks[command].result())
    for piece in re.split(r"\.\.\.|\n", re.sub(r"\d+", "#", shown)):
        assert piece.strip() in output, output[-4000:]
