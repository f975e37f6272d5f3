"""Train a GPT: python train.py [CONFIG.yaml] [section.key=value ...], alone or under torchrun. README.md shows the ways.

Exit codes: 0 finished, or nothing was left to do; 2 something only the user can put right; 128 + signal when told to stop
under torchrun; 1 anything else.
"""

import sys
from typing import TYPE_CHECKING

from mingpt.config import Config, parse
from mingpt.job import work

if TYPE_CHECKING:
    from mingpt.cluster import Cluster
    from mingpt.trainer import Trainer


def make_trainer(config: Config, cluster: "Cluster") -> "Trainer":
    from mingpt.trainer import Trainer  # after the settings are known to be right: it imports torch

    return Trainer(config, cluster)


def main() -> None:
    work(lambda: parse(sys.argv[1:]), make_trainer)


if __name__ == "__main__":
    main()
