"""Deployment: ``autotune.overlap`` on a caller's tensors and process group."""
