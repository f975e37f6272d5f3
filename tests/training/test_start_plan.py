"""The plan of a start, without a process: each reason why a run does not start, and what it starts from.

At the end is what holds for the plan of every start: `hypothesis` makes the facts of some nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.golden import Golden
from support.jobs import SMALL
from support.properties import examples
from support.snapshots import make_manifest

from mingpt.base.errors import CorruptSnapshot, NodeRefused, NodesLeave, UnreadableSnapshot
from mingpt.config import to_dict
from mingpt.config.cli import build
from mingpt.distributed import Launch
from mingpt.snapshot.manifest import Manifest, is_distrusted
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
from mingpt.training.start import end

RUN, OTHER, DATA = 32 * "a", 32 * "b", 64 * "0"
URL = "out/run/snapshots"


def facts(rank: int = 0, settings: dict[str, Any] | None = None, **known: Any) -> StartFacts:
    """The facts of a node's only worker; `settings` are those in which it differs from SMALL."""
    config = build(SMALL | {"run_dir": "out/run"} | (settings or {}))
    given: dict[str, Any] = {"node": rank, "host": f"host{rank}", "keeper": rank, "snapshot_keeper": rank}
    return StartFacts(config, **given | {"data": DATA, "url": URL, "token": OTHER} | known)


def manifest(step: int = 20, settings: dict[str, Any] | None = None, **fields: Any) -> Manifest:
    given: dict[str, Any] = {"config": to_dict(build(SMALL | (settings or {}))), "run": RUN, "generation": 1}
    given["software"] = {"torch": "", "device": "", "threads": 3, "dtype": "float32", "device_type": "cpu"}
    return make_manifest(step, **given | fields)


def offer(rank: int = 0, on_disk: bool = True, **fields: Any) -> Offer:
    written = manifest(**fields)
    return Offer(written.step, on_disk, URL if on_disk else "/dev/shm/x", rank, 0 if on_disk else 1, written)


def bad(step: int, fault: str, is_corrupt: bool = True, rank: int = 0) -> Offer:
    return Offer(step, True, URL, rank, 0, None, fault, is_corrupt)


def run(**fields: Any) -> Records:
    """Records of a run whose newest snapshot is that of step 20."""
    known: dict[str, Any] = {"last_step": 20, "run": RUN, "durable_step": 20, "generations": 1}
    return Records(**known | fields)


STARTED: dict[str, Any] = {
    "was_restarted": True,
    "records": run(of_this_job=True, settings=settings_digest(facts().config)),
}
SAVED: dict[str, Any] = {"records": run(), "offers": [offer()]}
NEVER, MUST, CHANGED = ({"snapshot.resume": resume} for resume in ("never", "must", "changed"))
EVALUATES: dict[str, Any] = {"trainer.eval_only": True}


def refused(kind: str, *known: StartFacts, nodes: Sequence[int] | None = None) -> Any:
    """A case: these facts give the refusal of this kind, of these nodes."""
    return pytest.param(kind, known, nodes, id=f"{kind}-{len(known)}-{nodes}")


def faulty(kind: str, rank: int = 0, **known: Any) -> StartFacts:
    values = FAULTS.get(kind, {"reason": "it is so"})
    return facts(rank, faults=[Fault(kind, values)], **known)


FAULTS: dict[str, dict[str, Any]] = {
    "disk": {"place": "/disk", "limit_s": 60},
    "not ours": {"run_dir": "r", "names": "config.yaml"},
    "not writable": {"run_dir": "r", "reason": "broken"},
    "private": {"url": "memory://x"},
}
CASES = [
    *(refused(kind, faulty(kind)) for kind in (*FAULTS, "device", "claimed", "data", "snapshots")),
    refused("data", facts(), faulty("data", 1)),
    refused("data", faulty("data"), facts(1, **STARTED), nodes=[0]),
    refused("data", faulty("data", round=2), facts(1, round=2), nodes=[0]),
    refused("data", faulty("data"), faulty("data", 1, **STARTED), facts(2), nodes=[0, 1]),
    refused("data", faulty("data"), faulty("data", 1, **STARTED)),
    refused("devices", facts(), facts(1, device="cuda")),
    refused("devices", facts(device="cuda"), facts(1, **STARTED, offers=[offer(1)]), nodes=[0]),
    refused("settings", facts(), facts(1, {"seed": 2, "snapshot.path": "/x"})),
    refused("settings", facts(0, {"seed": 2}), facts(1, **STARTED), nodes=[0]),
    refused("different data", facts(), facts(1, data=64 * "1")),
    refused("different data", facts(data=64 * "1"), facts(1, **STARTED, offers=[offer(1)]), nodes=[0]),
    refused("different runs", facts(records=run()), facts(1, records=run(run=OTHER))),
    refused("different runs", facts(**STARTED), facts(1, records=run(run=OTHER, last_step=99)), nodes=[1]),
    refused("workers", *map(facts, range(9))),
    refused("nothing to resume", facts(0, MUST)),
    refused("nothing to evaluate", facts(0, EVALUATES)),
    refused("fsdp", facts(0, {"trainer.parallel": "fsdp"}, device="mps")),
    refused("tokenizer", facts(host="host0"), facts(1, tokenizer="tokenizer.json")),
    refused("resume=never", facts(0, NEVER, **SAVED)),
    refused("other data", facts(**SAVED | {"data": 64 * "1"})),
    refused("other run", facts(records=run(), offers=[offer(run=OTHER)])),
    refused("init_from", facts(0, {"snapshot.init_from": "out/x"} | CHANGED, **SAVED)),
    refused("other model", facts(0, {"model.n_layer": 3} | CHANGED, **SAVED)),
    refused("other settings", facts(0, {"seed": 2}, **SAVED)),
    refused("other hardware", facts(**SAVED, dtype="bfloat16")),
    refused("unreadable", facts(0, NEVER, offers=[bad(5, "stale", False)])),
    refused("unreadable", facts(was_restarted=True)),
    refused("lost", facts(records=run(), offers=[bad(5, "damaged")])),
]


@pytest.mark.parametrize(("kind", "known", "nodes"), CASES)
def test_a_run_that_does_not_start_is_refused_in_one_sentence(
    kind: str, known: tuple[StartFacts, ...], nodes: list[int] | None, golden: Golden
) -> None:
    """In a job that has begun only the nodes at fault are refused, `nodes`; None means all."""
    found = plan_start(known)
    assert isinstance(found, Refusal) and found.kind == kind
    golden(found.sentence)
    assert found.nodes == (None if nodes is None else frozenset(nodes))
    assert found.hosts == ", ".join(f"host{node}" for node in nodes or ())
    assert found.may_pass == (kind == "unreadable")


def started(*known: StartFacts) -> Start:
    found = plan_start(known)
    assert isinstance(found, Start)
    return found


def test_a_run_goes_on_with_the_threads_and_the_number_of_its_snapshot() -> None:
    """A new run folder has no records: the run is that of the snapshot."""
    found = started(facts(offers=[offer(generation=6)], threads=2))
    assert (found.run_id, found.generation, found.threads, found.changes) == (RUN, 7, 3, [])


@pytest.mark.parametrize(
    ("evidence", "is_restart"),
    [({}, False), ({"was_restarted": True}, True), ({"records": run(of_this_job=True)}, True)],
)
def test_one_witness_of_an_earlier_generation_is_enough(evidence: dict[str, Any], is_restart: bool) -> None:
    """The launcher's store may be lost with its host, and run.json with its disk."""
    witness = facts(1, **{"records": run()} | evidence, offers=[offer(1)])
    assert started(facts(), witness).is_restart == is_restart


def test_only_a_restart_takes_a_snapshot_in_memory_that_is_newer_than_a_deleted_one() -> None:
    """A user has deleted the snapshots on disk after step 20."""
    offers = [offer(), offer(on_disk=False, step=45, after=40)]
    for was_restarted, step in ((False, 20), (True, 45)):
        found = started(facts(records=run(), offers=offers, was_restarted=was_restarted)).found
        assert found.choice and (found.choice.step, found.step_on_disk()) == (step, 20)


ENTRY = {"step": 25, "after": 20, "before_generation": 3, "workers": ["worker 1 on b (cpu)"]}
DIFFERED: dict[str, Any] = {"records": run(distrusted=[ENTRY])}
RESTARTED: dict[str, Any] = {"records": run(job_start=15), "was_restarted": True}


@pytest.mark.parametrize(
    ("known", "fields", "error"),
    [
        (RESTARTED, {}, None),
        (RESTARTED, {"settings": {"trainer.log_every": 9}}, None),
        (RESTARTED, {"settings": {"seed": 5}}, UnreadableSnapshot),
        (RESTARTED, {"data": {"path": "x", "sha256": 64 * "1"}}, UnreadableSnapshot),
        (RESTARTED, {"settings": {"seed": 5}, "step": 15}, None),  # from which the job began
        (DIFFERED, {"generation": 2}, CorruptSnapshot),
        (DIFFERED, {"generation": 3}, None),
    ],
)
def test_a_newer_snapshot_of_another_node_is_left_out_if_it_may_be_wrong_or_is_not_of_this_job(
    known: dict[str, Any], fields: dict[str, Any], error: type[Exception] | None
) -> None:
    """A node that joins may have brought one. One that was away knows of no difference between workers."""
    newest = offer(1, **{"step": 90} | fields)
    found = plan_start([facts(**known), facts(1, records=run(), offers=[newest])])
    if error:
        assert isinstance(found, Again)
        assert {place: type(fault) for place, fault in found.faults.items()} == {(1, 0, newest.step): error}
    else:
        assert isinstance(found, Start) and found.found.choice == newest
        assert found.generation == 1 + fields.get("generation", 1)


@pytest.mark.parametrize(
    ("here", "there", "step"),
    [((-1, 0), (7, 2), 5), ((9, 1), (6, 2), 6), ((9, 5), (20, 2), 20)],
    ids=["a node that joins", "a node that comes back", "a part that did not come as far"],
)
def test_the_records_come_from_the_node_that_knows_most_of_them(
    here: tuple[int, int], there: tuple[int, int], step: int
) -> None:
    """Both nodes have (last step, generations), and the run goes on from `step`."""
    known = []
    for rank, (last_step, generations) in enumerate((here, there)):
        found = run(last_step=last_step, generations=generations) if generations else Records()
        known.append(facts(rank, records=found, offers=[offer(rank, step=step)]))
    assert started(*known).source == 1


@pytest.mark.parametrize(
    ("changes", "settings", "expected"),
    [
        ({"trainer.log_every": 5}, {}, []),
        ({"trainer.compile": "true"}, {}, ["trainer.compile: auto -> True"]),
        ({"trainer.max_steps": 60}, {}, ["trainer.max_steps: 30 -> 60"]),
        ({"trainer.max_steps": 60, "seed": 3}, EVALUATES, []),
        ({"data.block_size": 16}, EVALUATES, ["data.block_size: 32 -> 16"]),
    ],
)
def test_settings_that_can_change_the_result_count(
    changes: dict[str, Any], settings: dict[str, Any], expected: list[str]
) -> None:
    """An evaluation compares only what can change it."""
    known = facts(0, changes | settings, **SAVED)
    if expected:
        found = plan_start([known])
        assert isinstance(found, Refusal) and found.kind == "other settings"
    assert started(facts(0, changes | settings | CHANGED, **SAVED)).changes == expected


@pytest.mark.parametrize(
    ("known", "settings"),
    [
        ({"records": run()}, NEVER),
        ({"offers": [bad(5, "damaged")]}, NEVER),
        ({"offers": [bad(0, "damaged")]}, {}),
        ({"offers": [bad(0, "damaged")], "was_restarted": True, "records": run(durable_step=0)}, {}),
    ],
)
def test_a_run_begins_at_0_if_it_has_no_later_snapshot_or_is_told_to(
    known: dict[str, Any], settings: dict[str, Any]
) -> None:
    assert started(facts(0, settings, **known)).found.choice is None


RUNS, FINGERPRINTS = (RUN, OTHER), (DATA, 64 * "1")
CONFIGS = [build(SMALL | changes) for changes in ({}, {"seed": 2}, NEVER, MUST, CHANGED, EVALUATES)]
RATIOS = st.sampled_from([False, False, False, True])  # mostly false


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
                data={"path": "x", "sha256": draw(st.sampled_from(FINGERPRINTS))},
                after=draw(st.integers(0, step)),
            )
            is_corrupt, where = bool(fault) and draw(st.booleans()), f"store {store}"
            found.append(Offer(step, is_on_disk, where, rank, store, manifest, fault, is_corrupt))
    return found


@st.composite
def facts_of(draw: st.DrawFn) -> list[StartFacts]:
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
                distrusted=[ENTRY] if draw(RATIOS) else [],
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
                data=FINGERPRINTS[draw(RATIOS) and draw(RATIOS)],
                offers=draw(offers_of(rank)),
                token=f"{rank}" * 32,
            )
        )
    return found


def without(facts: Sequence[StartFacts], faults: Mapping[Place, Exception]) -> list[StartFacts]:
    found = []
    for one in facts:
        offers = []
        for offer in one.offers:
            error = faults.get((offer.reader, offer.store, offer.step))
            is_corrupt = isinstance(error, CorruptSnapshot)
            offers.append(offer._replace(fault=str(error), is_corrupt=is_corrupt) if error else offer)
        found.append(replace(one, offers=offers))
    return found


@examples(300)
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
        distrusted = [(20, 3)] if any(one.records.distrusted for one in facts) else []
        assert not is_distrusted(choice.manifest, distrusted)
    elif facts[0].config.snapshot.resume != "never" and not facts[0].config.trainer.eval_only:
        assert not any(one.records.durable_step for one in facts), "a run begins anew by itself"
    assert plan.generation > max(one.records.generations for one in facts)
    of_snapshot = choice.manifest.run if choice and choice.manifest else None
    assert plan.snapshot_writers == sorted({one.snapshot_keeper for one in facts})
    assert plan.run_id in {one.records.run for one in facts} | {of_snapshot, 32 * "0"}


@pytest.mark.parametrize(("node", "error"), [(0, NodesLeave), (1, NodeRefused)])
def test_a_refused_node_leaves_and_the_others_are_told_which_ranks_do(
    node: int, error: type[Exception]
) -> None:
    refusal = Refusal("data", "its data differ", nodes=frozenset({1}), hosts="host1")
    context: Any = SimpleNamespace(launch=Launch(node_rank=node))
    with pytest.raises(error, match="the job goes on without host1") as raised:
        end(refusal, [facts(0), facts(1)], context)
    assert vars(raised.value).get("ranks", [1]) == [1]
