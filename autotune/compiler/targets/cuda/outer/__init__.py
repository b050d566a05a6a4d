"""Reductions over outer axes: neighbouring threads take neighbours on the kept axis."""
