"""The parts of :mod:`benchmarks.real_models`: which models there are, how one is measured, and the table of results."""
