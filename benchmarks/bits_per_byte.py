"""Bits per byte of one text under three tokenizers, after equal training bytes, computed in two ways.

    python benchmarks/bits_per_byte.py [--text data/input.txt] [--megabytes 4]

Trains one model per tokenizer (characters, byte-level BPE of 512 and of 4096 tokens, made by
`python -m mingpt prepare` from the training part) until each has seen as many bytes of text. The first way is
`val/bits_per_byte` of the run. The second knows neither the trainer's evaluation nor its count of a
token's bytes: it loads the final snapshot, sums -log2 p over the validation text, and divides by the
UTF-8 length of that text, less that of its first token. A row of JSON for each; exit code 1 unless both
agree within 1e-6 of their size.
"""

import argparse
import math
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from common import row, train

from mingpt.data import Tokenizer
from mingpt.model import GPT
from mingpt.snapshot import Snapshot, open_snapshot
from mingpt.tools.jobs import ROOT, Job, read_metric
from mingpt.training.state import load_weights, snapshot_tokenizer, snapshot_vocab_size

VAL_FRACTION = 0.1
SETTINGS = {"trainer.dtype": "float32", "trainer.sample_tokens": 0, "data.val_fraction": VAL_FRACTION}
BATCH = {"trainer.batch_size": 16, "data.block_size": 256}
LIMIT = 1e-6


def make_tokenizer(text: Path, vocab_size: int, work: Path) -> Path:
    """The tokenizer.json of a BPE trained on this text. Raises RuntimeError."""
    out = work / f"bpe-{vocab_size}"
    options = ["--tokenizer", "bpe", "--vocab_size", str(vocab_size), "--out", str(out)]
    job = Job(
        [sys.executable, "-m", "mingpt", "prepare", str(text), *options], work / f"prepare-{vocab_size}"
    )
    if job.wait(600):
        raise RuntimeError(job.err())
    return out / "tokenizer.json"


@torch.no_grad()
def score(snapshot: Snapshot, tokenizer: Tokenizer, text: str) -> float:
    """Bits per byte of a text, window by window as the model was trained, in float32."""
    config = snapshot.config
    block_size = config.data.block_size
    model = GPT(config.model, vocab_size=snapshot_vocab_size(snapshot.manifest), block_size=block_size).eval()
    load_weights(model, snapshot.tensors("model."), "the snapshot")
    tokens = torch.from_numpy(tokenizer.encode(text).astype("int64"))
    nats = 0.0
    for start in range(0, len(tokens) - 1, block_size):
        window = tokens[start : start + block_size + 1]
        logits, _ = model(window[:-1].unsqueeze(0))
        chosen = F.log_softmax(logits[0].double(), dim=-1).gather(1, window[1:].unsqueeze(1))
        nats -= float(chosen.sum())
    first = len(tokenizer.decode([int(tokens[0])]).encode())
    return nats / math.log(2) / (len(text.encode()) - first)


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--text", type=Path, default=ROOT / "data" / "input.txt")
    parser.add_argument("--megabytes", type=float, default=4.0)
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    n_train = int(len(text) * (1 - VAL_FRACTION))
    agree = True
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (work / "train.txt").write_text(text[:n_train])
        named = {"characters": "char"}
        named |= {f"BPE {size}": str(make_tokenizer(work / "train.txt", size, work)) for size in (512, 4096)}
        bytes_per_token = {"char": 1.0}
        for tokenizer_name, where in named.items():
            if where != "char":
                from mingpt.data import load_named_tokenizer

                tokenizer = load_named_tokenizer(where)
                bytes_per_token[where] = len(text[:n_train].encode()) / len(tokenizer.encode(text[:n_train]))
            per_step = BATCH["trainer.batch_size"] * BATCH["data.block_size"] * bytes_per_token[where]
            steps = round(arguments.megabytes * 1e6 / per_step)
            run_dir = work / tokenizer_name.replace(" ", "")
            data = {"data.path": arguments.text, "data.tokenizer": where}
            train(
                run_dir, SETTINGS | BATCH | data | {"trainer.max_steps": steps, "trainer.eval_every": steps}
            )
            snapshot = open_snapshot(str(run_dir))
            carried = snapshot_tokenizer(snapshot)
            assert carried is not None, "a run on a text has a tokenizer"
            logged = read_metric(run_dir, "val/bits_per_byte")[steps]
            computed = score(snapshot, carried, text[n_train:])
            agree = agree and abs(logged - computed) <= LIMIT * computed
            row(
                tokenizer=tokenizer_name,
                vocabulary=len(carried),
                bytes_per_token=round(bytes_per_token[where], 3),
                steps=steps,
                trained_bytes=round(steps * per_step),
                val_loss=read_metric(run_dir, "val/loss")[steps],
                logged_bits_per_byte=logged,
                computed_bits_per_byte=computed,
                difference=abs(logged - computed) / computed,
            )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
