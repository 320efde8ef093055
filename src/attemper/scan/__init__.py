"""The scan: what scale a real model really applies, and whether its attention is healthy."""
