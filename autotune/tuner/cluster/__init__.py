"""A search on the devices of a Ray cluster: a lane is an actor, what it searches is dealt out as on one host."""
