"""The fusion suite: its peers, and the runner behind ``python -m benchmarks.fusion``."""
