"""Regions: groups of operators of a captured graph that are tuned together, their names and their storage."""
