"""Row-wise and pointwise kernels: threads share a row."""
