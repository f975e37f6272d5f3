"""Turn text into token shards with their tokenizer: the same files and options give the same bytes.

This holds whatever the number of cores. A file gets its name when it is complete; meta.json says when all
are, and a folder without that is refused by this command and by the trainer. Memory grows with the longest
line alone.
"""
