"""Whole steps under each compiler, and what they launch."""
