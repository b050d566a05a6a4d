"""Schedules taken from one database to another, as one file."""
