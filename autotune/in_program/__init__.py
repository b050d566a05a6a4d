"""Searches inside of a user's program, within a budget of seconds."""
