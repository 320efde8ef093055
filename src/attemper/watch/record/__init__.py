"""watch/record."""
