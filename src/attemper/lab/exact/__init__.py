"""lab/exact."""
