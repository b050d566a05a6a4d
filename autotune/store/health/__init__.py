"""Rows that cannot be used, failures to be forgotten: found, named and passed over."""
