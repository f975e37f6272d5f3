"""Commands of `python -m mingpt`: verify, compare, doctor, plan, prepare and export.

No other package of mingpt imports this one.
"""
