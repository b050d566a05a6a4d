"""The fusion suite's cases, in PyTorch and once more in JAX."""
