"""The commands `python -m mingpt COMMAND`: verify, doctor, plan, prepare and export.

No other room imports this one.
"""
