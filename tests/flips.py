"""Claims whose evidence is changed: every number of a claim must be able to turn its verdict."""

import copy

from attemper.lab.claims import claims


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
    """With the first changes a claim has another verdict than with those that follow, which change this number of it."""
    first, then, expected = flip

    def judged_after(changes):
        changed = copy.deepcopy(evidence)
        for source, wanted, new in changes:
            change(changed[source], wanted, **new)
        return next(one for one in claims.judge(changed) if one.claim.id == name)

    before, after = judged_after(first), judged_after([*first, *then])
    assert named(before, number) != named(after, number)
    assert before.verdict != expected
    assert after.verdict == expected
