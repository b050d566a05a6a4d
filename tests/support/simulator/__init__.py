"""Runs CUDA kernels in plain Python, to test what they mean where there is no GPU.

``printer`` prints a kernel as a generator, ``machine`` runs it for every thread, and ``groups`` compares what comes out
with the oracle.
"""
