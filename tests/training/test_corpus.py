import pytest
import torch
from support.single_process import SingleProcess

from mingpt.config import DataConfig
from mingpt.data import CharTokenizer
from mingpt.training.initial_weights import InitialWeights
from mingpt.training.run_data import initial_rows

ABC = CharTokenizer("abc")


@pytest.mark.parametrize(
    ("rows", "tokenizer", "config", "expected"),
    [
        (5, ABC, DataConfig(), 5),
        (2, ABC, DataConfig(), None),  # a token was added to the tokenizer, and no row to the model
        (5, CharTokenizer("abd"), DataConfig(), None),
        (5, ABC, DataConfig(vocab_size=8), None),
        (5, None, DataConfig(), None),
    ],
)
def test_an_embedding_keeps_its_rows_where_the_tokenizer_is_the_same(
    rows: int, tokenizer: CharTokenizer | None, config: DataConfig, expected: int | None
) -> None:
    initial = InitialWeights({"wte.weight": torch.zeros(rows, 4)}, ABC, None, "there")
    assert initial_rows(config, SingleProcess(), tokenizer, initial) == expected
    assert initial_rows(config, SingleProcess(), tokenizer, None) is None
