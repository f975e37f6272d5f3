"""Turn text into token shards with their tokenizer: the same files and options give the same bytes.

This holds whatever the number of cores, and however often the command was killed and started again. A file
gets its name when it is complete; meta.json says when all are. Memory grows with the longest line alone.
"""
