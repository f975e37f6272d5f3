"""The rules of .ci/house.py, and the sentences that tests compare."""

import subprocess
import sys

from support.golden import sentences

from mingpt.tools.jobs import ROOT


def test_the_rules_of_the_house_hold() -> None:
    done = subprocess.run([sys.executable, ROOT / ".ci" / "house.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "packages 13, layers 8" in done.stdout and "the core: " in done.stdout


def test_each_sentence_belongs_to_a_test() -> None:
    texts = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    places = [key.partition("[")[0].split("::") for key in sentences()]
    assert [place for place in places if f"def {place[1]}(" not in texts.get(place[0], "")] == []
