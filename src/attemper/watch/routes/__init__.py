"""watch/routes."""
