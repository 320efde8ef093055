"""Experiments on details of common explanations, one question per file; they train nothing."""
