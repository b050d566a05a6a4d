"""Measurement of a strategy on all ranks together."""
