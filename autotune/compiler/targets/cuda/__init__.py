"""CUDA: geometry, printer and cubins; here the names in stored kernels, which deployment reads alone."""

GENERATOR = "cuda-4"
"""Version of the emitted code, which is part of an artifact; it changes with the meaning of the code."""
OVERWRITES = "overwrites"
"""The key of launch data for pairs of an input and an output that may be one tensor."""
PREFIX = "autotune_"
"""Prefix of the names of autotune's kernels, in profiles and cubins."""
