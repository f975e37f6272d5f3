import re
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from mingpt.config import Config, UserError, build, check_workers, differences, dump, flatten, parse, settings, to_dict


def test_the_shipped_file_spells_the_defaults_in_the_order_of_the_dataclasses() -> None:
    shipped = flatten(yaml.safe_load((ROOT / "gpt2_train_cfg.yaml").read_text()))
    assert list(shipped.items()) == list(flatten(to_dict(Config())).items())


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_configuration_loads_and_has_eight_micro_batches(path: Path) -> None:
    config = parse([str(path)])
    assert config.trainer.batch_size // config.trainer.micro_batch_size >= 8


def test_every_setting_is_read_somewhere() -> None:
    code = "".join(path.read_text() for path in (ROOT / "mingpt").glob("*.py") if path.name != "config.py") + (ROOT / "train.py").read_text()
    unread = [key for key in settings() if not re.search(rf"\.{key.rpartition('.')[2]}\b", code)]
    assert unread == []


def test_the_line_goes_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {n_layer: 3, n_head: 2}\n")
    for argv in (["model.n_head=1", str(file)], [str(file), "--model.n_head", "1"], ["--model.n_head=1", str(file)]):
        config = parse(argv)
        assert (config.model.n_layer, config.model.n_head, config.model.n_embd) == (3, 1, Config().model.n_embd)


def test_numbers_in_exponent_form_and_null_are_understood() -> None:
    config = parse(["optimizer.learning_rate=1e-3", "trainer.max_steps=7", "snapshot.path=null", "run_dir=12"])
    assert (config.optimizer.learning_rate, config.trainer.max_steps, config.snapshot.path, config.run_dir) == (1e-3, 7, None, "12")


def test_what_is_printed_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(["model.n_layer=5", "--print_config"])
    assert stop.value.code == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert parse([str(tmp_path / "printed.yaml")]) == parse(["model.n_layer=5"])
    assert yaml.safe_load(dump(Config())) == to_dict(Config())


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and all(key in text and item.about in text for key, item in settings().items())


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("model.n_layers=3", "unknown setting 'model.n_layers'; did you mean 'model.n_layer'?"),
        ("n_layer=3", "unknown setting 'n_layer'; did you mean 'model.n_layer'?"),
        ("model=3", "model is a section"),
        ("model.n_layer=two", "model.n_layer must be a whole number at least 1, not 'two'"),
        ("model.n_layer=0", "model.n_layer must be a whole number at least 1, not 0"),
        ("model.n_layer=2.5", "model.n_layer must be a whole number"),
        ("model.dropout=1", "model.dropout must be a number at least 0 and below 1, not 1.0"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate must be a number above 0"),
        ("optimizer.learning_rate=inf", "optimizer.learning_rate must be a number above 0"),
        ("model.arch=gpt3", "model.arch must be one of gpt2, modern, not 'gpt3'"),
        ("trainer.compile=perhaps", "trainer.compile must be true or false"),
        ("model.n_head=3", "model.n_embd (128) must be divisible by model.n_head (3)"),
        ("model.n_head=128", "must be even for the rotary positions"),
        ("trainer.micro_batch_size=7", "trainer.batch_size (16) must be divisible by trainer.micro_batch_size (7)"),
        ("data.sha256=abc", "data.sha256 must be 64 hexadecimal digits"),
        ("--trainer.max_steps", "--trainer.max_steps needs a value"),
        ("run_dir=", "run_dir must be a local folder, not ''"),
        ("run_dir=s3://bucket/run", "run_dir must be a local folder"),
        ("seed=18446744073709551616", "seed must be"),
        ("", "the configuration file  cannot be read"),
        ("elsewhere.yaml", "the configuration file elsewhere.yaml cannot be read: No such file or directory"),
    ],
)
def test_a_mistake_is_one_sentence(argument: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        parse([argument])
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("model: [1, 2\n", "is not valid YAML"),
        ("model: {n_layer: 1}}\n", "is not valid YAML"),
        ("- a\n- b\n", "must hold sections"),
        ("modle:\n  n_layer: 3\n", "unknown setting 'modle.n_layer'; did you mean 'model.n_layer'?"),
        ("model: {n_layer: 1}\nmodel: {n_head: 1}\n", "'model' stands there twice"),
        ("model: &m {x: *m}\n", "nested without end"),
        ("model: {n_layer: null}\n", "model.n_layer must be a whole number at least 1, not None"),
        ("trainer: {dtype: null}\n", "trainer.dtype must be one of"),
        ("seed: {}\n", "seed must be"),
        ("extra: {}\n", "unknown setting 'extra'"),
        ("model:\n", "model is a section"),
        ("\tmodel: 3\n", "is not valid YAML"),
    ],
)
def test_a_broken_file_is_one_sentence(content: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text(content)
    with pytest.raises(UserError) as error:
        parse([str(tmp_path / "broken.yaml")])
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_two_files_are_refused() -> None:
    with pytest.raises(UserError, match="two configuration files"):
        parse(["a.yaml", "b.yaml"])


def test_more_workers_than_micro_batches_names_both_ways_out() -> None:
    check_workers(build({}), 8)
    with pytest.raises(UserError, match=r"9 workers cannot share the 8 micro-batches .* trainer.micro_batch_size .* at most 8 workers"):
        check_workers(build({}), 9)


def test_only_settings_that_change_the_result_differ() -> None:
    old, new = to_dict(build({})), to_dict(build({"run_dir": "elsewhere", "trainer.log_every": 3, "model.n_layer": 2, "snapshot.every": 9}))
    assert differences(old, new) == ["model.n_layer: 3 -> 2"]
