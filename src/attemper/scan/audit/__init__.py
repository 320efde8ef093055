"""scan/audit."""
