"""data/make_corpus.py, which writes the embedded play."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT


def test_the_embedded_play_is_what_its_program_writes() -> None:
    command = [sys.executable, "data/make_corpus.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_entropy_counts_every_choice_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with an independent count: a choice among n equally likely options has a surprisal of log n."""
    monkeypatch.syspath_prepend(str(ROOT / "data"))
    from make_corpus import surprisals

    of_cat = surprisals((("cat ", 1.0), ("car ", 1.0), ("dog ", 2.0)), "cat ")
    assert sum(of_cat) == pytest.approx(np.log(4)) and of_cat[1] == 0.0
