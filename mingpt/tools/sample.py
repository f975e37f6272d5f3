"""Generate text with a trained model: python -m mingpt sample out/default --prompt "..." --tokens 300.

Prints the prompt, then the text, and nothing else; several samples are separated by a line of dashes. A
sample ends early at an end-of-text token, except with --prompt_tokens. In a terminal, if no prompt is given,
the program asks for one prompt after another: Ctrl-C stops a text, Ctrl-D ends the program.
"""

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mingpt.base.command import CommandParser, write_stdout
from mingpt.base.errors import UserError
from mingpt.base.files import decode_text, reason_of
from mingpt.base.paths import refuse_pipe, typed_path

if TYPE_CHECKING:
    import torch

    from mingpt.data import Tokenizer
    from mingpt.model import GPT


BATCH = 16  # samples that are generated at once; each has a key/value cache
TERMINAL_LINE = 4096  # characters that a prompt typed in a terminal may have
SEPARATOR = "---------------\n"
NANOGPT_OPTIONS = {
    "--out_dir": "the first argument, as in python sample.py out/default",
    "--start": "--prompt TEXT, and --start=FILE:PATH is --prompt_file PATH",
    "--max_new_tokens": "--tokens N",
}


def make_parser() -> CommandParser:
    parser = CommandParser("python -m mingpt sample", __doc__)
    parser.add_argument(
        "run",
        nargs="?",
        type=typed_path,
        default="out/default",
        help="run folder or snapshot folder, whose newest snapshot is used, or step_*.safetensors; a path or "
        "URL; or a Hugging Face model: its folder, gpt2, gpt2-medium, gpt2-large or gpt2-xl "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--best", action="store_true", help="the snapshot with the lowest validation loss, not the newest"
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        help="text to continue (default: ask in a terminal; elsewhere end-of-text if there is such a token, "
        "else a newline)",
    )
    prompt.add_argument(
        "--prompt_file", type=typed_path, metavar="PATH", help="file with the text to continue; - for stdin"
    )
    prompt.add_argument(
        "--prompt_tokens", metavar="IDS", help="tokens to continue, as in 464,3290; prints tokens, not text"
    )
    parser.add_argument(
        "--tokens", type=int, default=300, help="number of tokens to generate (default: %(default)s)"
    )
    parser.add_argument("--num_samples", type=int, default=1, help="how many samples (default: %(default)s)")
    parser.add_argument(
        "--device",
        default="auto",
        help="auto, cpu, cuda, cuda:N or mps; auto: cuda if there is one, else cpu (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="float32",
        help="type of weights and products; auto: bfloat16 if it is fast, worth it for several samples "
        "(default: %(default)s)",
    )
    parser.add_argument("--stop", metavar="TEXT", help="end a sample before this text")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: %(default)s)")
    parser.add_argument(
        "--top_k", type=int, default=None, help="sample from the k most likely tokens (default: all)"
    )
    parser.add_argument(
        "--top_p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the fewest most likely tokens whose probabilities sum to at least P, after "
        "temperature and top_k (default: all)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="the same seed gives the same text (default: %(default)s)"
    )
    return parser


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    for name in (word.partition("=")[0] for word in words):
        if name in NANOGPT_OPTIONS:
            parser.error(f"here nanoGPT's {name} is {NANOGPT_OPTIONS[name]}")
    arguments = parser.parse_args(words)
    for name, low in (("tokens", 0), ("num_samples", 1), ("top_k", 1), ("seed", 0)):
        value = getattr(arguments, name)
        if value is not None and not low <= value < 2**63:
            parser.error(f"--{name} must be at least {low}, not {value}")
    if not 0 <= arguments.temperature < math.inf:
        parser.error(f"--temperature must be a finite number of at least 0, not {arguments.temperature}")
    if not 0 < arguments.top_p <= 1:
        parser.error(f"--top_p must be above 0 and at most 1, not {arguments.top_p}")
    return arguments


def main(words: Sequence[str]) -> int:
    try:
        sample(parse_arguments(words))
    except KeyboardInterrupt:
        return 130
    return 0


def sample(arguments: argparse.Namespace) -> None:
    from mingpt.distributed.device import resolve_dtype
    from mingpt.model import GPT
    from mingpt.snapshot.contents import load_weights
    from mingpt.training.initial_weights import open_weights

    device = find_device(arguments.device)
    weights = open_weights(arguments.run, arguments.best, asked="")
    vocab_size = weights.vocab_size
    tokenizer = None if arguments.prompt_tokens is not None else weights.tokenizer
    has_prompt = arguments.prompt is not None or arguments.prompt_file is not None
    # Not sys.stdin, which is None if it is closed.
    is_interactive = not has_prompt and os.isatty(0) and sys.stdout.isatty()
    text, prompt = "", list[int]()
    if tokenizer is None:
        prompt = read_prompt_tokens(arguments, vocab_size)
        text = ",".join(map(str, prompt))
    elif not is_interactive:
        text, prompt = read_prompt(arguments, tokenizer)
    # The model's tables grow with block_size, so it is only as large as the prompt and the new tokens need.
    block_size = min(weights.block_size, (len(prompt) or TERMINAL_LINE) + arguments.tokens)
    model = GPT(weights.model, vocab_size=vocab_size, block_size=block_size)
    load_weights(model, weights.tensors, arguments.run)
    model.to(device, resolve_dtype(arguments.dtype, device)).eval()
    if tokenizer and is_interactive:
        answer_prompts(model, tokenizer, arguments)
    else:
        write_samples(model, tokenizer, text, prompt, arguments)


def find_device(wanted: str) -> "torch.device":
    """Return the device that --device names (`wanted`). Raises UserError if the device is unusable."""
    import torch

    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {wanted} cannot be used: {reason_of(error)}") from None


def answer_prompts(model: "GPT", tokenizer: "Tokenizer", arguments: argparse.Namespace) -> None:
    """Ask for prompts until Ctrl-D, and write the samples for each prompt; Ctrl-C stops these samples."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (if Python has it, it gives input() a history)
    while True:
        try:
            text, prompt = encode_prompt(input("prompt (Ctrl-D ends): ") or None, tokenizer)
            write_samples(model, tokenizer, text, prompt, arguments)
        except (UserError, UnicodeDecodeError) as error:
            sys.stderr.write(f"error: {error}\n")
        except KeyboardInterrupt:
            write_stdout("\n")
        except EOFError:
            write_stdout("\n")
            return


def write_samples(
    model: "GPT", tokenizer: "Tokenizer | None", text: str, prompt: list[int], arguments: argparse.Namespace
) -> None:
    """Write the samples to stdout, each after the prompt `text`; `prompt` has the prompt's tokens.

    Without a tokenizer, write the numbers of the tokens, separated by commas.
    """
    for number, tokens in enumerate(samples(model, tokenizer, prompt, arguments)):
        if number:
            write_stdout(SEPARATOR)
        write_stdout(text)
        pieces = tokenizer.decode_pieces(tokens) if tokenizer else (f",{token}" for token in tokens)
        write_pieces(pieces, arguments.stop)


def samples(
    model: "GPT", tokenizer: "Tokenizer | None", prompt: list[int], arguments: argparse.Namespace
) -> Iterator[Iterable[int]]:
    """Yield the tokens of each sample, without the prompt.

    If there is only one sample, its tokens come as they are generated.
    """
    from mingpt.model import generate_batch

    for first in range(0, arguments.num_samples, BATCH):
        last = min(first + BATCH, arguments.num_samples)
        steps = generate_batch(
            model,
            prompt,
            arguments.tokens,
            [arguments.seed + number for number in range(first, last)],
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            vocab_size=len(tokenizer) if tokenizer else None,
            end=tokenizer.end_of_text if tokenizer else None,
        )
        if arguments.num_samples == 1:
            yield (token for (token,) in steps if token is not None)
            return
        rows = list(steps)
        for number in range(last - first):
            yield [token for token in (row[number] for row in rows) if token is not None]


def read_prompt(arguments: argparse.Namespace, tokenizer: "Tokenizer") -> tuple[str, list[int]]:
    """Return the prompt's text and its tokens, from --prompt or --prompt_file.

    Without these options, the prompt is the tokenizer's default. Raises UserError if the text is empty or
    cannot be read or encoded.
    """
    text = arguments.prompt
    if arguments.prompt_file is not None:
        path = arguments.prompt_file
        refuse_pipe(path, "--prompt_file")
        try:
            content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
            text = decode_text(content)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", error)
            raise UserError(f"--prompt_file {path} cannot be read: {reason}") from None
    return encode_prompt(text, tokenizer)


def encode_prompt(text: str | None, tokenizer: "Tokenizer") -> tuple[str, list[int]]:
    """Return the prompt `text` and its tokens. None stands for the tokenizer's default prompt.

    Raises UserError if the text is empty or cannot be encoded.
    """
    if text is None:
        tokens = tokenizer.default_prompt()
        return tokenizer.decode(tokens), tokens
    tokens = tokenizer.encode(text).tolist()
    if not tokens:
        raise UserError("the prompt is empty and there is nothing to continue: give at least one character")
    return text, tokens


def read_prompt_tokens(arguments: argparse.Namespace, vocab_size: int) -> list[int]:
    """Return the tokens of --prompt_tokens.

    Raises UserError if the option is absent, or is anything but numbers below `vocab_size`.
    """
    text = arguments.prompt_tokens
    if text is None:
        raise UserError("the run has no tokenizer: give tokens to continue, as in --prompt_tokens 464,3290")
    words = text.replace(",", " ").split()
    tokens = [int(word) for word in words if word.isascii() and word.isdigit() and int(word) < vocab_size]
    if not tokens or len(tokens) < len(words):
        raise UserError(f"--prompt_tokens must be numbers below {vocab_size}, as in 464,3290, not {text!r}")
    return tokens


def write_pieces(pieces: Iterator[str], stop: str | None) -> None:
    """Write pieces of text to stdout as they arrive, until the text `stop` occurs, and then a newline.

    If `stop` is None, all pieces are written. The last characters of a piece may be the beginning of `stop`,
    so they are written with the next piece.
    """
    held, waiting = "", len(stop) - 1 if stop else 0
    for piece in pieces:
        held += piece
        if stop and stop in held:
            held = held[: held.index(stop)]
            break
        ready = max(0, len(held) - waiting)
        write_stdout(held[:ready])
        held = held[ready:]
    write_stdout(held + "\n")
