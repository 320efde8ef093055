"""lab/engine."""
