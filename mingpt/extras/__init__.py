"""Modules that a table of the core names and that are imported only when they are asked for."""
