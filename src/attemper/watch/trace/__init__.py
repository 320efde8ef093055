"""watch/trace."""
