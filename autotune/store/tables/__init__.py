"""Queries, one module for each subject; :class:`~autotune.store.store.Store` inherits from all of them."""
