"""A compact GPT and a fault-tolerant trainer for it under torchrun. README.md describes the packages."""
