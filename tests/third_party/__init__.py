"""Small models of other packages, and what is asked of each: run by scripts/third_party.py, not by pytest."""
