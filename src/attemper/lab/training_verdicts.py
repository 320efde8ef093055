"""training_verdicts: what the training experiments' rows say about the claims on training. Pure functions, as in verdicts.py."""

from __future__ import annotations

from .verdicts import Evidence, Judgement


def falls_apart(evidence: Evidence) -> Judgement:
    raise NotImplementedError


def converges_faster(evidence: Evidence) -> Judgement:
    raise NotImplementedError


def commits_early(evidence: Evidence) -> Judgement:
    raise NotImplementedError


def limits_depth(evidence: Evidence) -> Judgement:
    raise NotImplementedError
