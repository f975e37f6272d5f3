"""Text to token shards that many runs can share, with their tokenizer: the same files give the same bytes.

Whatever the number of cores, and however often the command was killed and started again. A file has its
name when it is complete; meta.json comes last. Memory does not grow with the text.
"""
