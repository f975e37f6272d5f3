"""A compact GPT and a fault-tolerant trainer whose result depends on its configuration and never on the cluster."""

__version__ = "0.1.0"
