"""Regions: which operators of a captured graph are tuned together, and what each region is called and stored as."""
