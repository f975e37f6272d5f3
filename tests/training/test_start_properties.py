"""What holds for the plan of every start: `hypothesis` makes the facts of some nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from conftest import SMALL
from hypothesis import given, settings
from hypothesis import strategies as st
from support.snapshots import make_manifest

from mingpt.base.errors import CorruptSnapshot
from mingpt.config import to_dict
from mingpt.config.cli import build
from mingpt.snapshot.manifest import is_distrusted
from mingpt.snapshot.search import Offer
from mingpt.training.plan import (
    REFUSALS,
    Again,
    Fault,
    Place,
    Records,
    Refusal,
    Start,
    StartFacts,
    plan_start,
    settings_digest,
)

RUNS, DATA = (32 * "a", 32 * "b"), (64 * "0", 64 * "1")
CONFIGS = [
    build(SMALL | changes)
    for changes in (
        {},
        {"seed": 2},
        {"snapshot.resume": "never"},
        {"snapshot.resume": "must"},
        {"snapshot.resume": "changed"},
        {"trainer.eval_only": True},
    )
]
RATIOS = st.sampled_from([False, False, False, True])  # mostly false
DISTRUSTED = {"step": 25, "after": 15, "before_generation": 3, "workers": ["worker 1 on b (cpu)"]}


@st.composite
def offers_of(draw: st.DrawFn, rank: int) -> list[Offer]:
    """What a rank's Stores offer: newer snapshots with faults, then one without a fault."""
    found = []
    for store in range(draw(st.integers(0, 2))):
        steps = sorted(draw(st.sets(st.integers(0, 60), max_size=3)), reverse=True)
        is_on_disk = store == 0
        for number, step in enumerate(steps):
            fault = "damaged" if number < len(steps) - 1 or draw(RATIOS) else ""
            manifest = make_manifest(
                step,
                run=draw(st.sampled_from([*RUNS, None])),
                generation=draw(st.integers(1, 4)),
                config=to_dict(draw(st.sampled_from(CONFIGS[:2]))),
                data={"path": "x", "sha256": draw(st.sampled_from(DATA))},
                after=draw(st.integers(0, step)),
            )
            is_corrupt, where = bool(fault) and draw(st.booleans()), f"store {store}"
            found.append(Offer(step, is_on_disk, where, rank, store, manifest, fault, is_corrupt))
    return found


@st.composite
def facts_of(draw: st.DrawFn) -> list[StartFacts]:
    """The facts of one to four ranks, on one to four nodes."""
    nodes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    config, has_begun = draw(st.sampled_from(CONFIGS)), draw(st.booleans())
    found = []
    for rank, node in enumerate(sorted(nodes)):
        own = draw(st.sampled_from(CONFIGS)) if draw(RATIOS) else config
        records = Records()
        if draw(st.booleans()):
            records = Records(
                of_this_job=has_begun and not draw(RATIOS),
                last_step=draw(st.integers(0, 60)),
                run=draw(st.sampled_from(RUNS)) if draw(RATIOS) else RUNS[0],
                job_start=draw(st.none() | st.integers(0, 40)),
                durable_step=draw(st.integers(0, 60)),
                distrusted=[DISTRUSTED] if draw(RATIOS) else [],
                generations=draw(st.integers(1, 5)),
                is_reported=draw(st.booleans()),
                settings=draw(st.sampled_from(["", settings_digest(config)])),
            )
        faults = [Fault("data", {"reason": "no text"}, draw(st.booleans()))] if draw(RATIOS) else []
        found.append(
            StartFacts(
                own,
                node=node,
                host=f"host{node}",
                device="cuda" if draw(RATIOS) and draw(RATIOS) else "cpu",
                faults=faults,
                was_restarted=has_begun and draw(st.booleans()),
                round=draw(st.integers(1, 2)),
                keeper=draw(st.integers(0, rank)),
                snapshot_keeper=draw(st.integers(0, rank)),
                records=records,
                data=DATA[1] if draw(RATIOS) and draw(RATIOS) else DATA[0],
                offers=draw(offers_of(rank)),
                token=32 * "c",
            )
        )
    return found


def without(facts: Sequence[StartFacts], faults: Mapping[Place, Exception]) -> list[StartFacts]:
    """The facts once each rank has left out these offers."""
    found = []
    for one in facts:
        offers = []
        for offer in one.offers:
            error = faults.get((offer.reader, offer.store, offer.step))
            is_corrupt = isinstance(error, CorruptSnapshot)
            offers.append(offer._replace(fault=str(error), is_corrupt=is_corrupt) if error else offer)
        found.append(replace(one, offers=offers))
    return found


@settings(max_examples=300, derandomize=True, deadline=None)
@given(facts_of())
def test_every_start_has_one_answer_that_keeps_the_rules(facts: list[StartFacts]) -> None:
    nodes = {one.node for one in facts}
    plan: Any = plan_start(facts)
    rounds = 0
    while isinstance(plan, Again):
        assert plan.faults, "otherwise the ranks would ask for ever"
        places = {(one.reader, one.store, one.step) for rank in facts for one in rank.offers if not one.fault}
        assert plan.faults.keys() <= places
        facts = without(facts, plan.faults)
        plan, rounds = plan_start(facts), rounds + 1
        assert rounds <= 10
    assert plan == plan_start(list(facts))
    if isinstance(plan, Refusal):
        assert plan.kind in REFUSALS and plan.sentence
        is_later = any(one.was_restarted or one.round > 1 or one.records.of_this_job for one in facts)
        assert plan.nodes is None or (is_later and plan.nodes and plan.nodes < nodes)
        return
    assert isinstance(plan, Start)
    assert not any(one.faults for one in facts), "a rank with a fault takes part in nothing"
    offers, choice = [offer for one in facts for offer in one.offers], plan.found.choice
    usable = [one for one in offers if not one.fault and one.is_on_disk]
    if choice:
        assert choice in offers and not choice.fault and choice.manifest
        assert all(choice.step >= one.step for one in usable), "a newer snapshot on disk is lost"
        assert choice.manifest.data.sha256 == facts[0].data
        assert plan.generation > choice.manifest.generation
        distrusted = [(15, 3)] if any(one.records.distrusted for one in facts) else []
        assert not is_distrusted(choice.manifest, distrusted)
    elif facts[0].config.snapshot.resume != "never" and not facts[0].config.trainer.eval_only:
        assert not any(one.records.durable_step for one in facts), "a run begins anew by itself"
    assert plan.generation > max(one.records.generations for one in facts)
    of_snapshot = choice.manifest.run if choice and choice.manifest else None
    assert plan.run_id in {one.records.run for one in facts} | {of_snapshot, 32 * "c"}
