"""Queries, a file for each subject; :class:`~autotune.store.store.Store` inherits from all of them."""
