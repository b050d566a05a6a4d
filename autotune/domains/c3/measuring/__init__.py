"""Measuring a strategy on all ranks together."""
