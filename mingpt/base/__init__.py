"""What every room stands on: errors that say what becomes of the job, events, and what is done with files.

Knows no other room.
"""
