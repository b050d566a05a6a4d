"""Checks for hosts with GPUs."""
