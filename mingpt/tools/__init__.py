"""The commands `python -m mingpt COMMAND` but timeline: verify, compare, doctor, plan, prepare, export.

No other package of mingpt imports this one.
"""
