"""The targets that print and compile kernel programs."""
