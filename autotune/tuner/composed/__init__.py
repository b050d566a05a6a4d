"""Workloads made of parts that are tuned by themselves."""
