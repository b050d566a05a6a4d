"""Attention, said to torch so that a fused kernel takes it: the rules, and what they know of a Dynamo graph."""

from autotune.compiler.capture.attention.rules import rewrite_attention, what_hides

__all__ = ["rewrite_attention", "what_hides"]
