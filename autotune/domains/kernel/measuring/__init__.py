"""A kernel in processes of its own: making its inputs, verifying and timing candidates."""
