"""Claims judged on changed evidence: every number of a claim must be able to turn its verdict."""

from attemper_lab.claims import claims
from attemper_lab.claims.judgement import VERDICTS


def judged_by_id(evidence, train=False):
    """Every claim, judged on this evidence."""
    return {judgement.claim.id: judgement for judgement in claims.judge(evidence, train)}


def names_by_verdict(judged):
    """Each verdict, and the claims that have it."""
    return {verdict: {name for name in judged if judged[name].verdict == verdict} for verdict in VERDICTS}


def change(rows, wanted, **new):
    for row in rows:
        if all(row[name] == value for name, value in wanted.items()):
            row.update({name: value(row) if callable(value) else value for name, value in new.items()})


def named(claim, start):
    """The number of a claim whose name begins so."""
    (name,) = [name for name in claim.numbers if name.startswith(start)]
    return claim.numbers[name]


def times(factor, *columns):
    return {column: lambda row, column=column: row[column] * factor for column in columns}


def assert_turns(name, number, flip, evidence):
    """With the first changes a claim has another verdict than with those that follow, which change this number of it; where a
    verdict has several reasons, another reason, given by its first words."""
    first, then, expected = flip
    judge = claims.of_id(name).judge

    def judged_after(changes):
        changed = dict(evidence)
        for source, wanted, new in changes:
            changed[source] = [dict(row) for row in changed[source]]
            change(changed[source], wanted, **new)
        return judge(changed)

    before, after = judged_after(first), judged_after([*first, *then])
    assert named(before, number) != named(after, number)
    if expected not in VERDICTS:
        assert not before.condition.startswith(expected)
        assert after.condition.startswith(expected)
        return
    assert before.verdict != expected
    assert after.verdict == expected
