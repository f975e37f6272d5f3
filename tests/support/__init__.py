"""Helpers that several tests share: small models, runs, snapshots, and a context without a process group."""
