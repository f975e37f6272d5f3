"""Commands of their own, `python -m mingpt COMMAND`: verify, doctor, plan, prepare and export.

Nothing in the other rooms knows them.
"""
