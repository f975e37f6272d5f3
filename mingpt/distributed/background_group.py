"""The name before group.py, for the files that still import it."""

from mingpt.distributed.group import BackgroundGroup, save_needs_peers

__all__ = ["BackgroundGroup", "save_needs_peers"]
