"""The kernel IR: typed expressions and statements that schemes build, passes rewrite, and targets print."""
