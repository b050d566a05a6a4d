"""CPUs: Numba source whose inner loops LLVM vectorises, and its launch over threads."""
