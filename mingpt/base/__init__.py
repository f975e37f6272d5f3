"""Code that every room (package of mingpt/) uses: errors that decide a job's fate, events, files, URLs.

Imports no other room.
"""
