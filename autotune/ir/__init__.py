"""The region graph: loads, pointwise operators and reductions over axes; its canonical form, and the oracle that
runs it.
"""
