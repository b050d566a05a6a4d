"""Aten calls become values of a region graph."""
