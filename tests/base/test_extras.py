"""Extras, some of which act at events: one that is not there is left out; an error inside one is an error."""

import re
from pathlib import Path

import pytest

from mingpt.base import events, extras
from mingpt.tools.jobs import ROOT


def test_exactly_the_documented_events_are_emitted() -> None:
    source = "".join(path.read_text() for path in (ROOT / "mingpt").rglob("*.py"))
    emitted = set(re.findall(r'events\.emit\(\s*"(\w+)"', source))
    assert emitted == set(events.EVENTS)


def test_only_an_absent_module_counts_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(extras, "missing", [])
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    assert extras.load_extra("string:digits") == "0123456789"
    assert extras.load_extra("mingpt.extras.no_such_extra:ANSWER") is None
    assert extras.missing == ["mingpt.extras.no_such_extra"]
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        extras.load_extra("needs_more:ANSWER")
