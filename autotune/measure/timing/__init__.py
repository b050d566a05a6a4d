"""Timing of a device: alone, with cold caches, contenders in turn."""
