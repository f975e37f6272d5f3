import numpy as np
from conftest import SMALL
from support.single_process import SingleProcess

from mingpt.config.cli import build
from mingpt.data import CharDataset, ElasticSampler
from mingpt.training.audit import START, Audit, digest, recompute

CONFIG = build(SMALL)
DATASET = CharDataset(np.random.default_rng(0).integers(0, 50, 3000).astype(np.uint8), 32)


def audit_of(steps: int, spoil: bool = False) -> Audit:
    """The audit after so many steps; with `spoil`, one micro-batch of step 3 was read one token too far."""
    audit = Audit(START, 8)
    windows = iter(ElasticSampler(DATASET, batch_size=8, micro_batch_size=1, seed=CONFIG.seed))
    for step in range(steps):
        for micro_batch in range(8):
            window = next(windows) + (spoil and step == 3 and micro_batch == 5)
            audit.add(micro_batch, *DATASET.__getitems__([window]))
        audit.end_step()
    return audit


def test_the_chain_is_what_configuration_and_text_call_for() -> None:
    audit = audit_of(6)
    for _ in range(2):  # gathering again changes nothing
        chain = audit.gather_chain(SingleProcess())
        assert chain() == recompute(CONFIG, DATASET, 6)
        assert audit.steps == []


def test_one_window_in_the_wrong_place_is_noticed() -> None:
    chain = audit_of(6, spoil=True).gather_chain(SingleProcess())
    assert chain() != recompute(CONFIG, DATASET, 6)


def test_inputs_and_targets_are_both_part_of_the_digest() -> None:
    inputs, targets = DATASET.__getitems__([5])
    digests = {digest(inputs, targets), digest(inputs + 1, targets), digest(inputs, targets + 1)}
    assert len(digests) == 3
