"""watch/attach."""
