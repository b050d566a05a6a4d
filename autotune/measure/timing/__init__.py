"""Timing on a device: exclusive, with cold caches, contenders in turn."""
