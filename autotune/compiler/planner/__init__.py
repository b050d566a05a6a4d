"""Plans: assignment of operators to kernels and of kernels to launches, and predicted times of plans and schedules."""
