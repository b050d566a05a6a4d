"""A computation beside a collective, run as a strategy says."""
