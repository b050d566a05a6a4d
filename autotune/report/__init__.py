"""A static site of results: pages from a database or from result files, without a network."""
