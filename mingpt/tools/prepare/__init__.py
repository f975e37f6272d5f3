"""Text to token shards that many runs can share, with their tokenizer: the same files give the same bytes.

This holds whatever the number of cores, and however often the command was killed and started again. A file
gets its name when it is complete; meta.json comes last. Memory does not grow with the text.
"""
