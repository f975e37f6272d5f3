"""Code that any package of mingpt/ may use: errors that decide a job's fate, events, files, URLs.

The parser and exit codes of commands, and threads with a time limit, are here, too.

Imports no other package of mingpt/.
"""
