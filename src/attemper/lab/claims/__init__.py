"""lab/claims."""
