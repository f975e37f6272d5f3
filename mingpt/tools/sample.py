"""Generate text with a trained model: python -m mingpt sample out/default --prompt "..." --tokens 300.

Prints, for each sample, the prompt, then the generated text, and nothing else, but a line of dashes between
two samples. A sample ends early at an end-of-text token.
"""

import argparse
from collections.abc import Sequence

import torch

from mingpt.base.command import CommandParser, write_stdout
from mingpt.base.errors import UserError
from mingpt.base.files import reason_of
from mingpt.base.paths import typed_path
from mingpt.data import Tokenizer
from mingpt.distributed.device import resolve_dtype
from mingpt.model import GPT, generate_batch
from mingpt.model.weights import load_weights
from mingpt.snapshot import Snapshot, open_snapshot
from mingpt.training.contents import check_model, make_tokenizer

BATCH = 16  # samples that are generated at once; each has a key/value cache
SEPARATOR = "---------------\n"


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("python -m mingpt sample", __doc__)
    add = parser.add_argument
    add(
        "run",
        nargs="?",
        type=typed_path,
        default="out/default",
        help="run folder or snapshot folder, whose newest snapshot is used, or step_*.safetensors; a path or "
        "URL (default: %(default)s)",
    )
    add("--best", action="store_true", help="the snapshot with the lowest validation loss, not the newest")
    add("--prompt", help="text to continue (default: end-of-text if there is such a token, else a newline)")
    add("--tokens", type=int, default=300, help="number of tokens to generate (default: %(default)s)")
    add("--num_samples", type=int, default=1, help="how many samples (default: %(default)s)")
    add(
        "--device",
        default="auto",
        help="auto, cpu, cuda, cuda:N or mps; auto: cuda if there is one, else cpu (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="float32",
        help="type of weights and products; auto: bfloat16 if it is fast, worth it for several samples "
        "(default: %(default)s)",
    )
    add("--temperature", type=float, default=0.8, help="0 is greedy (default: %(default)s)")
    add("--top_k", type=int, help="sample from the k most likely tokens (default: all)")
    add(
        "--top_p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the fewest most likely tokens whose probabilities sum to at least P, after "
        "temperature and top_k (default: all)",
    )
    add("--seed", type=int, default=1, help="the same seed gives the same text (default: %(default)s)")
    arguments = parser.parse_args(words)
    for name, low in (("tokens", 0), ("num_samples", 1), ("top_k", 1), ("seed", 0), ("temperature", 0)):
        value = getattr(arguments, name)
        if value is not None and not low <= value < 2**63:
            parser.error(f"--{name} must be at least {low} and below 2**63, not {value}")
    if not 0 < arguments.top_p <= 1:
        parser.error(f"--top_p must be above 0 and at most 1, not {arguments.top_p}")
    return arguments


def main(words: Sequence[str]) -> int:
    sample(parse_arguments(words))
    return 0


def sample(arguments: argparse.Namespace) -> None:
    device = find_device(arguments.device)
    snapshot = open_snapshot(arguments.run, check_model, weights_only=True, best=arguments.best)
    tokenizer = make_tokenizer(snapshot.manifest, snapshot.read_tokenizer())
    if tokenizer is None:
        raise UserError(
            "the run has no tokenizer, so it has no text: continue tokens by mingpt.model.generate_batch, or "
            "give a new run its weights by snapshot.init_from and a tokenizer by data.tokenizer"
        )
    text, prompt = read_prompt(arguments.prompt, tokenizer)
    # The model's tables grow with block_size, so it is only as large as the prompt and the new tokens need.
    block_size = min(snapshot.config.data.block_size, len(prompt) + arguments.tokens)
    model = make_model(snapshot, block_size, arguments.run)
    model.to(device, getattr(torch, resolve_dtype(arguments.dtype, device)))
    write_samples(model, tokenizer, text, prompt, arguments)


def load(where: str) -> tuple[GPT, Tokenizer | None]:
    """Return the model of a run, in float32 and in eval mode, and its tokenizer (None: the run has none).

    `where` is the path or URL of a run folder, of a folder of snapshots or of a snapshot; "@best" after a
    folder means the snapshot with the lowest validation loss. Raises UserError if no snapshot can be used, or
    if its tokenizer cannot be used.
    """
    snapshot = open_snapshot(where, check_model, weights_only=True)
    tokenizer = make_tokenizer(snapshot.manifest, snapshot.read_tokenizer())
    return make_model(snapshot, snapshot.config.data.block_size, where), tokenizer


def make_model(snapshot: Snapshot, block_size: int, where: str) -> GPT:
    vocab_size = snapshot.manifest.tokenizer.vocab_size
    model = GPT(snapshot.config.model, vocab_size=vocab_size, block_size=block_size)
    load_weights(model, snapshot.tensors("model."), where)
    return model.eval()


def find_device(wanted: str) -> torch.device:
    """Return the device that --device names (`wanted`). Raises UserError if the device is unusable."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {wanted} cannot be used: {reason_of(error)}") from None


def write_samples(
    model: GPT, tokenizer: Tokenizer, text: str, prompt: list[int], arguments: argparse.Namespace
) -> None:
    """Write the samples to stdout, each after the prompt `text`; `prompt` has the prompt's tokens."""
    seeds = range(arguments.seed, arguments.seed + arguments.num_samples)
    for first in range(0, len(seeds), BATCH):
        batch = seeds[first : first + BATCH]
        steps = generate_batch(
            model,
            prompt,
            arguments.tokens,
            batch,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            vocab_size=len(tokenizer),
            end=tokenizer.end_of_text,
        )
        rows = list(steps)
        for number in range(len(batch)):
            tokens = [token for token in (row[number] for row in rows) if token is not None]
            write_stdout(f"{SEPARATOR if first + number else ''}{text}{tokenizer.decode(tokens)}\n")


def read_prompt(text: str | None, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Return the text of --prompt and its tokens. None stands for the tokenizer's default prompt.

    Raises UserError if the text is empty or cannot be encoded.
    """
    if text is None:
        tokens = tokenizer.default_prompt()
        return tokenizer.decode(tokens), tokens
    tokens = tokenizer.encode(text).tolist()
    if not tokens:
        raise UserError("the prompt is empty and there is nothing to continue: give at least one character")
    return text, tokens
