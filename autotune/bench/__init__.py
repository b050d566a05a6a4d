"""The fusion suite: its cases, the peers they are measured against, and the runner behind ``autotune bench fusion``.

Nothing outside this package and its command imports it.
"""
