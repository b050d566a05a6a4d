"""Frozen databases: one read-only file with what deployment needs, and nothing else."""
