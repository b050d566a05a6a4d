"""One rule for each aten operator; importing this package registers them. A new rule is an entry here and its test."""

from autotune.compiler.lower.rules import pointwise, reductions
from autotune.compiler.lower.rules.table import RULES

__all__ = ["RULES", "pointwise", "reductions"]
