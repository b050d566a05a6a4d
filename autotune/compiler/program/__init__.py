"""Kernel programs: a group of operators as passes over rows and columns. They have no threads and no target."""
