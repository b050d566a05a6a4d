"""Reductions over outer axes, with adjacent threads along the kept axis."""
