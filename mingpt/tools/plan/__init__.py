"""Estimates what a run needs before it is started: memory and bytes sent; which strategy fits it.

Figures follow from the configuration by formulas, which tests and benchmarks compare with measurements.
"""
