"""Whole steps under each compiler, what they launch, and the files that results are kept in; ``fusion/`` is a suite."""
