"""Experiments that train nothing, one question per file; experiments.toml has the questions and their order."""
