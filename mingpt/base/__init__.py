"""Code that every package of mingpt may import: exceptions, events, and work with files, URLs and processes.

This package imports no other package of mingpt.
"""
