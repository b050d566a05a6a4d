"""A static site of what was tuned: pages from a database or from result files, without a network."""
