"""Frozen databases: one read-only file to deploy from, or to import."""
