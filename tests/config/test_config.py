from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from mingpt.base.errors import UserError
from mingpt.config import Config, check_workers, differences, flatten, settings, to_dict
from mingpt.config.cli import build, parse


def test_the_shipped_file_spells_the_defaults_in_the_order_of_the_dataclasses() -> None:
    shipped = flatten(yaml.safe_load((ROOT / "gpt2_train_cfg.yaml").read_text()))
    assert list(shipped.items()) == list(flatten(to_dict(Config())).items())


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_configuration_loads_and_can_be_shared_by_workers(path: Path) -> None:
    config = parse([str(path)])
    workers = 2 if path.name == "shakespeare_char.yaml" else 8  # that one is for two cores
    assert config.trainer.batch_size // config.trainer.micro_batch_size >= workers


def test_more_workers_than_micro_batches_are_refused() -> None:
    config = build({"trainer.batch_size": 12, "trainer.micro_batch_size": 3})
    check_workers(config, 4)
    with pytest.raises(UserError, match=r"start at most 4 workers, or lower .*batch_size \(now 3\)"):
        check_workers(config, 5)


def test_every_setting_of_the_model_and_of_the_optimizer_affects_the_result() -> None:
    sections = ("model.", "optimizer.")
    assert [
        key for key, one in settings().items() if key.startswith(sections) and not one.affects_result
    ] == []


def test_only_settings_that_change_the_result_differ() -> None:
    """A setting that a snapshot does not name had its default."""
    changes = {"run_dir": "elsewhere", "trainer.log_every": 3, "snapshot.every": 9, "trainer.workers": 7}
    changes |= {"trainer.max_restarts": 7, "model.n_layer": 2, "model.dropout": 0.5}
    changes |= {"data.vocab_size": 300, "optimizer.schedule": "linear"}
    assert differences({}, to_dict(build(changes))) == [
        "data.vocab_size: None -> 300",
        "model.n_layer: 3 -> 2",
        "model.dropout: 0.0 -> 0.5",
        "optimizer.schedule: cosine -> linear",
    ]
