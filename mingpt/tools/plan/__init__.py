"""The costs of a run before it is started: memory and bytes sent; which strategy fits, or what to change.

Figures follow from the configuration by formulas, which tests and benchmarks compare with measurements.
"""
