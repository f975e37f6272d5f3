import re

import pytest
from conftest import ROOT

from mingpt.base import events


def test_subscribing_to_an_unknown_event_names_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"no event 'step_ends'; there are .*step_end, "):
        events.subscribe("step_ends", print)


def test_exactly_the_documented_events_are_emitted() -> None:
    source = "".join(path.read_text() for path in (ROOT / "mingpt").rglob("*.py"))
    emitted = set(re.findall(r'events\.emit\(\s*"(\w+)"', source))
    assert emitted == set(events.EVENTS)
