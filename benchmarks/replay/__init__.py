"""Searching again what was measured once: recordings of whole search spaces, replays of searches in them, regret."""
