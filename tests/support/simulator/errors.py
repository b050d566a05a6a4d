"""What a simulated kernel did wrong."""


class KernelError(AssertionError):
    """The kernel did something that would be wrong, or undefined, on a GPU."""
