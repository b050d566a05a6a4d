"""Graph rewrites in Inductor's compilation before the search for regions, and the capture of the same graphs."""
