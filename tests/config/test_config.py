from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from mingpt.base.errors import UserError
from mingpt.config import Config, check_workers, differences, flatten, settings, to_dict, to_yaml
from mingpt.config.cli import build, parse
from mingpt.tools.jobs import ROOT


@pytest.mark.parametrize(
    "words", [["model.n_head=1", "FILE"], ["FILE", "--model.n_head", "1"], ["--model.n_head=1", "FILE"]]
)
def test_the_line_goes_over_the_file_and_the_file_over_the_defaults(words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {n_layer: 3, n_head: 2}\n")
    model = parse([word.replace("FILE", str(file)) for word in words]).model
    assert (model.n_layer, model.n_head, model.n_embd) == (3, 1, Config().model.n_embd)


def test_what_is_printed_is_what_a_run_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(["model.n_layer=5", "--print_config"])
    assert stop.value.code == 0 and capsys.readouterr().out == to_yaml(parse(["model.n_layer=5"]))


def test_the_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    assert [name for name in settings() if f" {name}=" not in shown] == []


def refusal(words: Sequence[str]) -> str:
    with pytest.raises(UserError) as error:
        parse(words)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("model.n_layers=3", "unknown setting 'model.n_layers'; did you mean 'model.n_layer'?"),
        ("n_layer=3", "unknown setting 'n_layer'; did you mean 'model.n_layer'?"),
        ("trainer.max_iters=5", "did you mean 'trainer.max_steps'?"),
        ("lr=0.1", "unknown setting 'lr'; see --help"),
        ("model.n_layer=two", "model.n_layer must be a valid integer, not 'two'"),
        ("model.n_layer=0", "model.n_layer must be greater than or equal to 1, not '0'"),
        ("model.n_layer=true", "model.n_layer must be a valid integer, not 'true'"),
        ("model.dropout=1", "model.dropout must be less than 1, not '1'"),
        ("optimizer.learning_rate=inf", "optimizer.learning_rate must be a finite number, not 'inf'"),
        ("report.tracker=mlflow", "report.tracker must be 'wandb' or 'trackio', not 'mlflow'"),
        ("trainer.eval_windows=0", "trainer.eval_windows must be greater than or equal to 1, not '0'"),
        ("trainer.compile=perhaps", "trainer.compile must be 'auto' or be a valid boolean, not 'perhaps'"),
        ("trainer.workers=0", "trainer.workers must be 'auto' or be greater than 0, not '0'"),
        ("model.n_head=3", "model.n_embd (128) must be divisible by model.n_head (3)"),
        ("model.arch=gpt3", "or 'modern', not 'gpt3'"),
        (
            "trainer.micro_batch_size=7",
            "trainer.batch_size (16) must be divisible by trainer.micro_batch_size (7)",
        ),
        ("data.sha256=abc", "data.sha256 must match pattern '^[0-9a-fA-F]{64}$', not 'abc'"),
        ("--trainer.max_steps", "--trainer.max_steps needs a value"),
        ("run_dir=s3://bucket/run", "run_dir must be a local folder"),
        ("seed=18446744073709551616", "seed must be"),
        ("seed = 10", "two configuration files are given, seed and 10, and there may be one; settings are"),
        ("seed=1 seed=1 --seed=2", "seed is given twice, as 1 and as 2: leave one of them out"),
        ("a.yaml b.yaml", "two configuration files"),
        ("", "the configuration file '' is not a path"),
        ("$HOME/run.yaml", "the configuration file '$HOME/run.yaml' has a variable in it"),
        ("elsewhere.yaml", "the configuration file elsewhere.yaml cannot be read: No such file or directory"),
    ],
)
def test_a_mistake_is_one_sentence(argument: str, sentence: str) -> None:
    assert sentence in refusal(argument.split(" "))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("model: [1, 2\n", "is not valid YAML"),
        ("run_dir: {{ out }}\n", "found unhashable key"),
        ("- a\n- b\n", "is not valid YAML: it must hold sections"),
        ("modle:\n  n_layer: 3\n", "unknown setting 'modle.n_layer'; did you mean 'model.n_layer'?"),
        ("model: {n_layer: 1}\nmodel: {n_head: 1}\n", "'model' is repeated"),
        ("model: {n_layer: null}\n", "model.n_layer must be a valid integer, not 'null'"),
        ("trainer: {dtype: null}\n", "trainer.dtype must be 'auto', 'float32'"),
        ("seed: {}\n", "seed must be"),
        ("model:\n", "unknown setting 'model'; did you mean 'model.arch'?"),
        ("run_dir: x\n'run_dir': x\n", "'run_dir' is repeated"),
        ("run_dir: [out]\n", "run_dir must be a valid string, not ['out']"),
        ("model: {n_layer: {x: 2}}\n", "unknown setting 'model.n_layer.x'"),
    ],
)
def test_a_broken_file_is_one_sentence(content: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text(content)
    assert sentence in refusal([str(tmp_path / "broken.yaml")])


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
