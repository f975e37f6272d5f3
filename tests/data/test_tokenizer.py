import re

import numpy as np
import pytest
import tokenizers
from support.vocabularies import gpt2

from mingpt.base.errors import UserError
from mingpt.data import TOKENIZERS, CharTokenizer, load_tokenizer

TEXT = "Où? Ça, la mer; 海と空。 " * 40


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_and_one_read_back_from_its_bytes_decode_what_they_encode(name: str) -> None:
    tokenizer = gpt2() if name == "json" else TOKENIZERS[name].train(TEXT)
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens.tolist()) == TEXT and max(tokens) < len(tokenizer)
    assert tokens.dtype == np.min_scalar_type(len(tokenizer) - 1)
    copy = load_tokenizer(name, tokenizer.to_bytes())
    assert type(copy) is type(tokenizer) and copy.fingerprint() == tokenizer.fingerprint()
    assert copy.encode(TEXT).tolist() == tokens.tolist()


@pytest.mark.parametrize(
    ("character", "named"),
    [
        ("~", "U+007E, TILDE"),
        ("\U0010ffff", "U+10FFFF, without a name"),
        ("\x00", "U+0000, without a name"),
        ("\u0301", "U+0301, COMBINING ACUTE ACCENT"),
    ],
)
def test_a_character_that_the_vocabulary_lacks_is_named(character: str, named: str) -> None:
    with pytest.raises(UserError, match=re.escape(named)):
        CharTokenizer.train(TEXT).encode("la" + character)


@pytest.mark.parametrize(("characters", "prompt"), [("\t\nab", [1]), ("\tab", [0])])
def test_a_sample_begins_with_a_line_break_if_there_is_one(characters: str, prompt: list[int]) -> None:
    assert CharTokenizer(characters).default_prompt() == prompt


def test_a_character_tokenizer_is_a_tokenizer_json_too() -> None:
    text = TEXT + '\n\r\n\t \x00\u0301e\u0301\u2028\u00a0😀👩\u200d👧\U0010ffff"\\'
    ours = CharTokenizer.train(text)
    package = tokenizers.Tokenizer.from_str(ours.to_tokenizer_json().decode())
    tokens = ours.encode(text).tolist()
    assert package.encode(text).ids == tokens and package.decode(tokens) == text
    assert package.get_vocab_size() == len(ours)
