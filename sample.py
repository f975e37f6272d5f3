"""Write text with a trained model: python sample.py out/default --prompt "..." --tokens 300. Prints the prompt, then the text, nothing else."""

import argparse
import logging
import os
import sys

from mingpt.config import ModelConfig, UserError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "run", nargs="?", default="out/default", help="run folder, snapshot folder, or step_*.safetensors; a path or URL (default: %(default)s)"
    )
    parser.add_argument("--prompt", default=None, help="text to go on from (default: a line's end, if the vocabulary has one)")
    parser.add_argument("--tokens", type=int, default=300, help="how many to write (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest (default: %(default)s)")
    parser.add_argument("--top_k", type=int, default=None, help="choose among so many likeliest (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed writes the same text (default: %(default)s)")
    arguments = parser.parse_args()
    for name, low in (("tokens", 0), ("temperature", 0), ("top_k", 1), ("seed", 0)):
        if (value := getattr(arguments, name)) is not None and not low <= value < 2**63:
            parser.error(f"--{name} must be at least {low}, not {value}")
    logging.basicConfig(format="%(message)s")
    try:
        write(arguments)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except BrokenPipeError:
        os._exit(1)  # whoever read the text has gone
    return 0


def write(arguments: argparse.Namespace) -> None:
    import torch

    from mingpt.data import Vocabulary
    from mingpt.generate import generate
    from mingpt.model import GPT
    from mingpt.resume import load_weights
    from mingpt.snapshot import open_anywhere

    snapshot = open_anywhere(arguments.run)
    vocabulary, config = Vocabulary(snapshot.manifest["vocabulary"]), snapshot.manifest["config"]
    prompt = arguments.prompt if arguments.prompt is not None else "\n" if "\n" in vocabulary.characters else vocabulary.characters[0]
    if not prompt:
        raise UserError("--prompt is empty and there is nothing to go on from: give at least one character")
    tokens = vocabulary.encode(prompt).tolist()
    model = GPT(ModelConfig(**config["model"]), vocab_size=len(vocabulary), block_size=config["data"]["block_size"])
    load_weights(model, snapshot.part("model."), arguments.run)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    sys.stdout.write(prompt)
    for token in generate(model, tokens, arguments.tokens, temperature=arguments.temperature, top_k=arguments.top_k, seed=arguments.seed):
        sys.stdout.write(vocabulary.decode([token]))
        sys.stdout.flush()
    sys.stdout.write("\n")


if __name__ == "__main__":
    sys.exit(main())
