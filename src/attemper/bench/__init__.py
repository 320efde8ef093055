"""bench: what the operation costs in time and memory, beside torch's SDPA and eager attention."""
