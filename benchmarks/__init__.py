"""Benchmarks: suites, the form of their result files, and the tables made from them."""
