"""scan/show."""
