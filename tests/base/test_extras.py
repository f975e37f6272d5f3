"""Extras, some of which act at events: one that is not there is left out; an error inside one is an error."""

import re
from pathlib import Path

import pytest

from mingpt.base import events, extras
from mingpt.tools.jobs import ROOT


def test_subscribing_to_an_unknown_event_names_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"no event 'step_ends'; there are .*step_end, "):
        events.subscribe("step_ends", print)


def test_exactly_the_documented_events_are_emitted() -> None:
    source = "".join(path.read_text() for path in (ROOT / "mingpt").rglob("*.py"))
    emitted = set(re.findall(r'events\.emit\(\s*"(\w+)"', source))
    assert emitted == set(events.EVENTS)


def test_only_an_absent_module_counts_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(extras, "missing", [])
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    assert extras.load_extra("string:digits") == "0123456789"
    absent = ["no_such_extra", "mingpt.extras.no_such_extra", "no_such_package.extra"]
    assert not any(extras.load_extra(f"{module}:ANSWER") for module in absent)
    assert extras.missing == absent
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        extras.load_extra("needs_more:ANSWER")
    with pytest.raises(AttributeError):
        extras.load_extra("string:question")
