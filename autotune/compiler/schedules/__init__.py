"""Schedules: which choices a group has, the default, the seeds, and the limits of what is stored."""
