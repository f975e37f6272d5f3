"""The commands of `python -m mingpt`; mingpt/__main__.py lists them.

No other package of mingpt imports this one.
"""
