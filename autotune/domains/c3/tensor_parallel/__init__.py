"""Matrix products joined with an all-gather before them or a reduce-scatter behind them, for tensor parallelism."""
