"""Schedules: a group's choices, the default, the seeds, and the limits of stored configurations."""
