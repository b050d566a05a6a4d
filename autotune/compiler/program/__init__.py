"""Kernel programs: a group of operators as passes over rows and columns. They know no threads and no target."""
