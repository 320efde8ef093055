"""lab/maths."""
