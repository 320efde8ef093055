"""lab/real_model."""
