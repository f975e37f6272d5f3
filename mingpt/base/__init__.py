"""Code that every package of mingpt may import: exceptions, events, and work with files, URLs and processes.

The parser and the exit codes of commands, and threads with a time limit, are in this package, too. It imports
no other package of mingpt.
"""
