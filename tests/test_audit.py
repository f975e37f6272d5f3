import numpy as np
from conftest import SMALL

from mingpt.audit import START, Audit, digest, each_window_once, link, recompute
from mingpt.cluster import Cluster
from mingpt.config import build
from mingpt.data import CharDataset
from mingpt.sampler import ElasticSampler

CONFIG = build(SMALL)
DATASET = CharDataset(np.random.default_rng(0).integers(0, 50, 3000).astype(np.uint8), 32)


class Alone(Cluster):
    """A cluster of one, without a process group."""

    def __init__(self) -> None:
        self.world_size = 1


def fed(steps: int, spoil: bool = False) -> Audit:
    audit = Audit(START, 8)
    windows = iter(ElasticSampler(DATASET, batch_size=8, micro_batch_size=1, seed=CONFIG.seed))
    for step in range(steps):
        audit.steps.append({micro: digest(*DATASET.__getitems__([next(windows) + (spoil and step == 3 and micro == 5)])) for micro in range(8)})
    return audit


def test_the_chain_is_what_configuration_and_text_call_for() -> None:
    audit = fed(6)
    assert audit.gather(Alone())() == recompute(CONFIG, DATASET, 6) and audit.steps == []
    assert audit.gather(Alone())() == recompute(CONFIG, DATASET, 6)


def test_one_window_in_the_wrong_place_is_noticed() -> None:
    assert fed(6, spoil=True).gather(Alone())() != recompute(CONFIG, DATASET, 6)
    assert link(START, b"a" * 32 + b"b" * 32) != link(START, b"b" * 32 + b"a" * 32)


def test_every_window_of_an_epoch_is_dealt_once() -> None:
    assert each_window_once(CONFIG, DATASET, 5)
