"""Rows of the exact experiments on small settings, measured once in a process for the tests of the lab and of the figures."""

import functools

from attemper_lab import experiment

SMALL = {
    "worked": {},
    "variance": {"d": (2, 4), "samples": (1000,)},
    "saturation": {"n": (4, 16), "s": (0.5, 8.0), "rows": (32,)},
    "jacobian": {"d": (4, 16, 64), "n": (16,), "batches": (8,)},
    "gradient": {"d": (4, 8), "n": (16,), "batches": (2,), "rule": ("none", "sqrt_dk")},
    "two_keys": {"d": (2, 16), "samples": (1000,)},
    "divisors": {"d": (8, 16), "heads": (2, 96), "n": (16,), "batches": (8,)},
    "bounded": {"bound": (1.0, 2.0), "n": (8,)},
    "precision": {"size": (8.0, 64.0)},
    "additive_cost": {"n": (16,), "d": (8,), "rounds": (1,)},
    "parallel": {"n": (4, 8), "rounds": (1,)},
    "init": {"d": (4, 6), "d_model": (16,)},
    "width": {"d_model": (16, 64), "d": (4,)},
    "similarity": {"d": (2, 16), "n": (8,), "batches": (8,)},
    "ranges": {"tokens": (2, 4), "draws": (200,)},
    "head_dims": {"families": (12,)},
    "three_scores": {"d": (4, 8), "n": (16,)},
    "plateau": {"gap": (1.0, 3.0), "steps": (60,)},
    "scale_cost": {"n": (16, 32), "d": (4,), "rounds": (3,)},
    "heads_cost": {"n": (16,), "d_model": (16,), "heads": (2, 4), "rounds": (3,)},
    # the other rule and query are part of the claims' evidence
    "antecedent": {"rule": ("sqrt_dk",), "query": ("pronoun",), "permutations": (499,)},
    "own_key": {"pairs": (1,)},
    "real_heads": {"rule": ("none", "sqrt_dk"), "pairs": (1,)},
    "subspaces": {"pairs": (2,)},
}
GROUP = "exact"
"""The tests that share rows, and the embedded model, run in one process of pytest-xdist: pytest.mark.xdist_group(GROUP)."""


@functools.cache
def small(name):
    """The rows of an experiment. They are shared: copy them before you change them."""
    return experiment(name).run(**SMALL[name])
