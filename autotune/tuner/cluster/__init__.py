"""Search on the devices of a Ray cluster: each lane is an actor, and workloads are assigned as on one host."""
