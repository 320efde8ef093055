"""watch/routes/handwritten."""
