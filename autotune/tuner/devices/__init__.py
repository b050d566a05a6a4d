"""On which device a run searches its workloads, and in which order."""
