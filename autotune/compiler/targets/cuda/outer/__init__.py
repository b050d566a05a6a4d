"""Reductions over outer axes: threads lie side by side on the axis that is kept."""
