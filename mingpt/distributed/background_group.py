"""The name before group.py, for the files that still import it."""

from mingpt.distributed.group import BackgroundGroup

__all__ = ["BackgroundGroup"]
