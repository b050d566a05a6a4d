"""The fusion suite: its peers, and the runner behind ``autotune bench fusion``."""
