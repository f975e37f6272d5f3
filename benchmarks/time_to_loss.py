"""Wall time from the start of the process to a validation loss on tiny Shakespeare, with several seeds.

    python benchmarks/time_to_loss.py TEXT          # loss 1.898 in 10 s, 5 seeds: a minute
    python benchmarks/time_to_loss.py TEXT --seeds 1 trainer.max_steps=10     # seconds

The loss is that of the last step, whose number is fixed beforehand. It is a mean over the whole validation
split (the text's last tenth), in windows of block_size. Prints a row per seed, as JSON: the loss, and the
seconds until its record is in metrics.jsonl. Exit code 1 unless all seeds reach the target within
`--within_s`. Needs two cores that nobody else uses.
"""

import statistics
import sys
from pathlib import Path

from common import argument_parser, arguments_of, row, seconds_until, work_folder
from support.jobs import read_metric

RECIPE = {
    "model.arch": "modern", "model.n_layer": 2, "model.n_head": 2, "model.n_embd": 128,
    "data.block_size": 48, "trainer.batch_size": 32, "trainer.micro_batch_size": 32, "trainer.workers": 1,
    "trainer.threads": 2, "trainer.max_steps": 180, "optimizer.learning_rate": 0.03,
    "optimizer.schedule": "linear", "optimizer.warmup_steps": 0, "optimizer.min_lr_fraction": 0.0,
    "optimizer.momentum": 0.85, "optimizer.weight_decay": 0.3, "optimizer.beta1": 0.8,
    "trainer.eval_at_start": False, "trainer.eval_every": 10**6, "trainer.sample_tokens": 0,
    "trainer.log_every": 50, "trainer.device": "cpu", "snapshot.every": 10**6, "snapshot.memory_every": 0,
}  # fmt: skip


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--target", type=float, default=1.898)
    parser.add_argument("--within_s", type=float, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("settings", nargs="*", help="settings that override the recipe's")
    arguments = parser.parse_intermixed_args()
    settings = RECIPE | {"data.path": arguments.text.resolve()}
    reached, losses, times = 0, list[float](), list[float]()
    for seed in range(1, arguments.seeds + 1):
        with work_folder() as folder:
            run_dir = folder / "run"
            words = arguments_of(settings | {"seed": seed, "run_dir": run_dir}, arguments.settings)
            took = seconds_until([sys.executable, "train.py", *words], run_dir, "val/loss")
            loss = list(read_metric(run_dir, "val/loss").values())[-1]
            words = (run_dir / "log.txt").read_text().partition(" parameters")[0].split()
        parameters = int(words[-1].replace(",", ""))
        reached += loss <= arguments.target and took <= arguments.within_s
        losses.append(loss)
        times.append(took)
        row(seed=seed, parameters=parameters, val_loss=round(loss, 4), seconds=round(took, 2))
    row(
        target=arguments.target, within_s=arguments.within_s, seeds=arguments.seeds, reached=reached,
        loss_mean=round(statistics.fmean(losses), 4), loss_worst=round(max(losses), 4),
        seconds_median=round(statistics.median(times), 2), seconds_worst=round(max(times), 2),
    )  # fmt: skip
    return 0 if reached == arguments.seeds else 1


if __name__ == "__main__":
    sys.exit(main())
