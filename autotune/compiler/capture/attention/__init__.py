"""Rewrites of attention calls so that PyTorch selects a fused kernel: the rules and their analyses of Dynamo graphs."""

from autotune.compiler.capture.attention.rules import rewrite_attention, what_hides

__all__ = ["rewrite_attention", "what_hides"]
