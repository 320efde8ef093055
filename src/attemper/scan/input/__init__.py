"""scan/input."""
