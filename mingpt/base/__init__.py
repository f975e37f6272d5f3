"""Code that every room uses: errors that decide what becomes of the job, events, files, URLs, commands.

Imports no other room.
"""
