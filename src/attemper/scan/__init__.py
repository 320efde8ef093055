"""scan: what scale a real model applies, and whether its attention is healthy."""
