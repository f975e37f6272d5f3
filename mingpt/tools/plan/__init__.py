"""Estimate, before a run is started, what it needs: memory, bytes sent, and the strategy that fits.

Figures follow from the configuration by formulas, which tests and benchmarks compare with measurements.
"""
