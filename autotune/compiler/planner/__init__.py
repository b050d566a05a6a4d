"""Plans: which operators share a kernel, which kernels share a launch, and what a plan and a schedule are expected
to take.
"""
