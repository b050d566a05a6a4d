"""Searches inside a user's program: what the program compiles is searched at once, within a budget of seconds."""
