"""From a PyTorch graph to kernels: capture, regions, lowering, plans, kernel programs, schedules, and the two
targets.
"""
