"""The same spelling of a value is read alike on a command line and in a file, plain or quoted."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, reject
from hypothesis import strategies as st
from support.properties import examples

from mingpt.base.errors import UserError
from mingpt.config import flatten, to_dict, to_yaml
from mingpt.config.cli import build, parse

WHOLE, NUMBER = "must be a valid integer", "number, not"
LONG = "x" * 256
DURATION = "must be seconds, or hours, minutes and seconds as in 5h30m, not"


PLAIN = re.compile(r"[\w.,:;/~$+-]*[\w/~]|")  # what a file may have without quotes


class Sentence(str):
    """A part of the sentence that refuses a spelling."""


def answer(key: str, *words: str) -> Any:
    """What these words make of a setting: its value, or the sentence that refuses them."""
    try:
        return flatten(to_dict(parse(words)))[key]
    except UserError as error:
        return Sentence(error)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("seed", "008", 8),
        ("seed", "010", 10),
        ("seed", "+5", 5),
        ("seed", "-1", Sentence("must be greater than or equal to 0")),
        ("seed", "1:30", Sentence(WHOLE)),
        ("seed", "0x10", Sentence(WHOLE)),
        ("seed", "1_000", 1000),
        ("seed", "1,000", Sentence(WHOLE)),
        ("seed", "1e3", Sentence(WHOLE)),
        ("seed", "8.0", 8),
        ("seed", " 8 ", 8),
        ("seed", "true", Sentence("not 'true'")),
        ("seed", "null", Sentence("not 'null'")),
        ("seed", "", Sentence("not ''")),
        ("optimizer.learning_rate", "1e-3", 0.001),
        ("optimizer.learning_rate", "007", 7.0),
        ("optimizer.learning_rate", "1e999", Sentence(NUMBER)),
        ("optimizer.learning_rate", "NaN", Sentence(NUMBER)),
        ("model.dropout", "50%", Sentence(NUMBER)),
        ("snapshot.keep_best", "true", True),
        ("snapshot.keep_best", "False", False),
        ("snapshot.keep_best", "yes", True),
        ("snapshot.keep_best", "off", False),
        ("snapshot.keep_best", "maybe", Sentence("must be a valid boolean")),
        ("trainer.compile", "True", True),
        ("trainer.compile", "auto", "auto"),
        ("trainer.workers", "02", 2),
        ("trainer.eval_windows", "null", None),
        ("trainer.eval_windows", "None", Sentence(WHOLE)),
        ("trainer.eval_windows", "", Sentence(WHOLE)),
        ("trainer.device", "cpu\r", Sentence(r"must be 'auto', 'cpu', 'cuda' or 'mps', not 'cpu\r'")),
        *[
            ("trainer.pause_after", text, seconds)
            for text, seconds in (("90", 90.0), ("1.5", 1.5), ("15s", 15.0), ("90m", 5400.0), ("1e-05", 1e-5))
        ],
        ("trainer.pause_after", "5h30m", 19_800.0),
        ("trainer.pause_after", "1h2m3s", 3723.0),
        ("trainer.pause_after", "null", None),
        *[
            ("trainer.pause_after", text, Sentence(f"{DURATION} {text!r}"))
            for text in ("5h30", "1m90m", "30m5h", "90 m", "1:30", "1.5h", "-3", "h", "inf", "\u0663s", "")
        ],
        *[("trainer.pause_after", text, Sentence("must be greater than 0")) for text in ("0", "0h0m", "0.0")],
        ("report.tracker", "null", None),
        ("report.tracker", "no", Sentence("must be 'wandb' or 'trackio', not 'no'")),
        ("data.sha256", "null", None),
        ("data.sha256", "0" * 64, "0" * 64),
        ("data.sha256", "1e10", Sentence("must match pattern")),
        *[
            ("run_dir", text, text)
            for text in ("no", "008", "1.10", "1e3", "0x10", "true", "12:30:00", "2024_03_01", "2024-03-01")
        ],
        ("run_dir", "a: b #c", "a: b #c"),
        ("run_dir", "./null", "./null"),
        ("run_dir", "cost$5", "cost$5"),
        ("run_dir", "~/x", "/home/me/x"),
        ("run_dir", "~", "/home/me"),
        ("run_dir", "$HOME/x", Sentence("has a variable in it, which is not replaced here: write its value")),
        ("run_dir", "null", Sentence("run_dir 'null' is not a path: leave it out, or write ./NAME")),
        ("run_dir", "", Sentence("run_dir '' is not a path")),
        ("run_dir", "out/x\r", Sentence("has a line end or another control character in it")),
        ("run_dir", "a\nb", Sentence("has a line end or another control character in it")),
        ("run_dir", "a::b", Sentence("has :: in it")),
        ("run_dir", LONG, Sentence("has a name of more than 255 characters in it")),
        ("run_dir", "file:///tmp/x", Sentence("run_dir must be a local folder below /")),
        ("data.path", "~/text", "/home/me/text"),
        ("data.path", "https://host/x.csv?$limit=5", "https://host/x.csv?***"),
        ("data.path", "s3://$BUCKET/text", Sentence("has a variable in it")),
        ("data.path", "zip://a.txt::b.zip", "zip://a.txt::b.zip"),
        ("data.path", "none", Sentence("data.path 'none' is not a path")),
        ("data.tokenizer", "char", "char"),
        ("snapshot.path", "null", None),
        ("snapshot.path", "~/s", "/home/me/s"),
        ("snapshot.memory_path", "memory://x", Sentence("snapshot.memory_path must be a local folder")),
        ("snapshot.init_from", "~/gpt2", "/home/me/gpt2"),
    ],
)
def test_a_value_is_read_alike_on_a_command_line_and_in_a_file(
    key: str, text: str, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    file, contents = tmp_path / "run.yaml", [yaml.safe_dump({key: text}, default_style='"')]
    if PLAIN.fullmatch(text):
        contents.append(f"{key}: {text}\n")
    first = answer(key, f"{key}={text}")
    for content in contents:
        file.write_text(content, encoding="utf-8")
        assert answer(key, str(file)) == first, content
    if isinstance(expected, Sentence):
        assert isinstance(first, Sentence) and first.startswith(key) and expected in first
        assert len(first.splitlines()) == 1
    else:
        assert (type(first), first) == (type(expected), expected)


# Of which YAML makes numbers, dates, lists or comments, unless they are quoted.
PIECES = [
    *(
        "no",
        "008",
        "1.10",
        "2024-03-01",
        "12:30",
        "./null",
        "=",
        "<<",
        "- ",
        "? ",
        "*a",
        "&a",
        "!",
        "%",
        ": ",
    ),
    *(" #", "'", '"', "\\", " ", "{", "}", "[", "]", "|", ">", ",", "文 é", "\u2028", "\ufeff", "ab " * 20),
]
TEXTS = st.lists(
    st.sampled_from(PIECES) | st.characters(exclude_categories=["C"]), min_size=1, max_size=6
).map("".join)
GIVEN = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(["run_dir", "data.path", "snapshot.path", "snapshot.init_from"], TEXTS),
        "seed": st.integers(0, 2**63 - 1),
        "optimizer.learning_rate": st.floats(1e-300, 1e300),
        "trainer.pause_after": st.floats(1e-9, 1e9),
        "trainer.eval_windows": st.integers(1) | st.just("null"),
        "trainer.workers": st.integers(1) | st.just("auto"),
        "trainer.compile": st.booleans() | st.just("auto"),
        "snapshot.keep_best": st.booleans(),
    },
)


@examples(40)
@given(GIVEN)
def test_the_configuration_that_a_run_keeps_reads_back(
    tmp_path_factory: pytest.TempPathFactory, texts: dict[str, Any]
) -> None:
    try:
        config = build({key: str(value) for key, value in texts.items()})
    except UserError:
        reject()
    assume("://" not in f"{config.data.path} {config.snapshot.path} {config.snapshot.init_from}")  # redacted
    file = tmp_path_factory.getbasetemp() / "config.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert parse([str(file)]) == config
