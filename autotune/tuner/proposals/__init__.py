"""Proposals of a search: seeds, samplers, their history, and pruning."""
