"""The terminal and log.txt: a progress bar or a line for training, a line for evaluation."""

import logging
import sys

from tqdm import tqdm

from mingpt.report.sink import RunInfo, Sink, Values

log = logging.getLogger(__name__)


class ConsoleSink(Sink):
    """A bar on a terminal, a line per record otherwise."""

    def __init__(self, run: RunInfo) -> None:
        self.max_steps = run.max_steps
        self.bar = None
        if sys.stderr.isatty() and run.is_main:
            self.bar = tqdm(
                total=run.max_steps, initial=run.first_step, unit="step", file=sys.stderr, dynamic_ncols=True
            )

    def log(self, step: int, values: Values) -> None:
        if "val/loss" in values:
            names = [f"{name} {value:.4f}" for name, value in values.items() if name.startswith("val/")]
            log.info("step %d/%d  %s", step, self.max_steps, "  ".join(names))
        if "train/loss" in values:
            self.log_training(step, values)

    def log_training(self, step: int, values: Values) -> None:
        formats = {"train/loss": "loss {:.4f}", "lr": "lr {:.2e}", "tokens_per_s": "{:,.0f} tokens/s"}
        text = "  ".join(
            template.format(values[name]) for name, template in formats.items() if name in values
        )
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
        else:
            left_s = (self.max_steps - step) * values.get("step_s", 0.0)
            log.info("step %d/%d  %s  %.0f s left", step, self.max_steps, text, left_s)

    def on_step(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
