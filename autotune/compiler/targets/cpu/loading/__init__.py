"""From the source of a CPU kernel to a function: compiled, kept on disk, launched over threads."""
