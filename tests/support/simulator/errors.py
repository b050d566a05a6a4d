"""Faults of a simulated kernel."""


class KernelError(AssertionError):
    """The kernel did something that would be wrong, or undefined, on a GPU."""
