"""The tokenizer that --tokenizer asks for: characters, a BPE trained on the text, or one from elsewhere."""

from collections.abc import Iterator, Sequence

from mingpt.data import CharTokenizer, JsonTokenizer, Tokenizer, load_named_tokenizer
from mingpt.errors import UserError
from mingpt.prepare.batches import Batch, Position, Split, read_batches
from mingpt.prepare.documents import InputStats, utf8_length
from mingpt.prepare.encoding import Encoder
from mingpt.prepare.inputs import InputFile

END_OF_TEXT = "<|endoftext|>"
SAMPLE_BYTES = 200_000_000
SAMPLE_WORD_BYTES = 4_000_000  # of distinct words: training needs about 120 bytes of memory for each


def make_tokenizer(name: str, vocab_size: int, files: Sequence[InputFile], split: Split) -> Tokenizer:
    """Raises UserError for a tokenizer that cannot be had."""
    if name == "char":
        return CharTokenizer(split.stats.alphabet)
    if name == "bpe":
        return JsonTokenizer(train_bpe(vocab_size, files, split))
    return load_named_tokenizer(name, "--tokenizer")


def train_bpe(vocab_size: int, files: Sequence[InputFile], split: Split) -> bytes:
    """A tokenizer.json of a byte-level BPE as GPT-2's, trained on the beginning of the training part.

    `vocab_size` tokens: the bytes, the merges, and end-of-text as the last one; fewer if the text has not
    that many pairs. The same text gives the same content, whatever the number of cores.
    """
    try:
        from tokenizers import Tokenizer as PackageTokenizer
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise UserError(
            f"--tokenizer bpe needs the package tokenizers, which cannot be imported ({error}): "
            "pip install tokenizers"
        ) from None
    package = PackageTokenizer(models.BPE())
    package.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    package.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    package.train_from_iterator([], trainer)  # the bytes alone
    cutter = Encoder(JsonTokenizer(package.to_str().encode()))
    texts = sample(read_batches(files, split, cutter, Position()))
    package.train_from_iterator(texts, trainer)
    package.add_special_tokens([END_OF_TEXT])
    content: str = package.to_str(pretty=True)
    return content.encode()


def sample(batches: Iterator[Batch]) -> Iterator[str]:
    """Texts of the training part, until there are enough of them, or of distinct words."""
    words: set[str] = set()
    size = word_bytes = 0
    for batch in batches:
        for text in batch.texts:
            if batch.is_val or size >= SAMPLE_BYTES or word_bytes >= SAMPLE_WORD_BYTES:
                return
            new = set(text.split()) - words
            word_bytes += sum(map(utf8_length, new))
            words |= new
            size += utf8_length(text)
            yield text


def restore_tokenizer(name: str, stats: InputStats, content: bytes) -> Tokenizer:
    """The tokenizer of a command that goes on, from its tokenizer.json."""
    return CharTokenizer(stats.alphabet) if name == "char" else JsonTokenizer(content)
