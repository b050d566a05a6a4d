"""Searches inside a user's program, within a budget of seconds."""
