"""Common claims about √d_k, judged from the rows of the experiments.

In the order in which `attemper claims` passes them:

    claims.py             the claims (claims.toml), the evidence that they need, and running and judging all of them
    judgement.py          the verdicts there are, and what judging returns
    judge_exact.py        from rows of exact experiments to verdicts
    judge_gradients.py    from gradients before and while training to verdicts
    judge_real_model.py   from rows of a real model's heads to verdicts
    judge_training.py     from rows of training experiments to verdicts
    judge_notes.py        from rows to verdicts on C24 to C36
    cards.py              revision cards from the same evidence
    show.py               claims and cards for a terminal, claims as a page
"""
