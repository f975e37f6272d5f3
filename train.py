"""Train a GPT: python train.py [CONFIG.yaml] [section.key=value ...]; torchrun may start it. See README.md.

Exit codes:

- 0 if the run is finished or was stopped.
- 128 + signal after a second signal (1 under plain `python` with several workers) and, under torchrun, after
  any signal except SIGUSR1.
- 2 for a mistake that only the user can correct.
- 1 for any other error.
"""

from mingpt.launch.train import main

if __name__ == "__main__":
    main()
