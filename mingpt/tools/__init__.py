"""The commands of `python -m mingpt`, which mingpt/__main__.py lists, and their helpers.

No other package of mingpt imports this one, but `mingpt.load` is the `load` of sample.py.
"""
