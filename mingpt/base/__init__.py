"""Code that any room (package of mingpt/) may use: errors that decide a job's fate, events, files, URLs.

The frame of a command and work with a time limit are here, too.

Imports no other room.
"""
