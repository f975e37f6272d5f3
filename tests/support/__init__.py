"""Helpers that tests and benchmarks share, such as small models, whole jobs and simulated nodes."""
