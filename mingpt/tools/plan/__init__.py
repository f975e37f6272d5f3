"""What a run costs before it is started: memory and bytes sent; which strategy fits, or what to change.

Figures follow from the configuration by formulas that tests and benchmarks compare with what is measured.
"""
