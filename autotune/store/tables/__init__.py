"""What the store is asked, a file for each subject: :class:`~autotune.store.store.Store` inherits from all of them."""
