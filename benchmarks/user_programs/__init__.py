"""Programs as their users write them: steps launched from Python, with their optimizers, by several ways to compile."""
