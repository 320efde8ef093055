"""lab/training."""
