"""scan/examiners."""
