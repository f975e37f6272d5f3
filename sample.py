"""Generate text with a trained model: python sample.py out/default --prompt "..." --tokens 300.

Prints the prompt, then the text, and nothing else.
"""

import argparse
import logging
import os
import sys

from mingpt.errors import UserError
from mingpt.redact import RedactingFormatter, redact


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = "run folder, snapshot folder, or step_*.safetensors; a path or URL (default: %(default)s)"
    parser.add_argument("run", nargs="?", default="out/default", help=where)
    parser.add_argument(
        "--prompt", default=None, help="text to continue (default: a newline, if it is a token)"
    )
    parser.add_argument(
        "--tokens", type=int, default=300, help="number of tokens to generate (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: %(default)s)")
    parser.add_argument(
        "--top_k", type=int, default=None, help="sample from the k most likely tokens (default: all)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="the same seed gives the same text (default: %(default)s)"
    )
    arguments = parser.parse_args()
    for name, low in (("tokens", 0), ("temperature", 0), ("top_k", 1), ("seed", 0)):
        value = getattr(arguments, name)
        if value is not None and not low <= value < 2**63:
            parser.error(f"--{name} must be at least {low}, not {value}")
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler])
    try:
        sample(arguments)
    except UserError as error:
        sys.stderr.write(f"error: {redact(str(error))}\n")
        return 2
    except BrokenPipeError:
        os._exit(1)  # the reader of the text is gone
    return 0


def sample(arguments: argparse.Namespace) -> None:
    import torch

    from mingpt.model import GPT, generate
    from mingpt.snapshot import open_snapshot
    from mingpt.weights import check_model, load_weights, snapshot_tokenizer

    snapshot = open_snapshot(arguments.run, check_model)
    tokenizer, config = snapshot_tokenizer(snapshot), snapshot.config
    prompt = tokenizer.decode(tokenizer.default_prompt()) if arguments.prompt is None else arguments.prompt
    if not prompt:
        raise UserError("--prompt is empty and there is nothing to continue: give at least one character")
    tokens = tokenizer.encode(prompt).tolist()
    # Tables grow with the context's length, so there is no more of it than these tokens can fill.
    block_size = min(config.data.block_size, len(tokens) + arguments.tokens)
    model = GPT(config.model, vocab_size=len(tokenizer), block_size=block_size)
    load_weights(model, snapshot.tensors("model."), arguments.run)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    sys.stdout.write(prompt)
    generated = generate(
        model,
        tokens,
        arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    for token in generated:
        sys.stdout.write(tokenizer.decode([token]))
        sys.stdout.flush()
    sys.stdout.write("\n")


if __name__ == "__main__":
    sys.exit(main())
