"""The commands of `python -m mingpt`, except timeline: verify, compare, doctor, plan, prepare, export.

No other package of mingpt imports this one.
"""
