"""Results and schedules of C3 as the report shows them, and the form of result files."""
