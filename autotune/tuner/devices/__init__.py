"""Assignment and order of a run's workloads on devices."""
