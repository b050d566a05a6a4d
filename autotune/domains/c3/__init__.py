"""C3: concurrent compute and communication, how a GEMM and a collective share one GPU (ConCCL, arXiv 2412.14335)."""
