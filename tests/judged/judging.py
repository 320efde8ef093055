"""What the scan says of a case, and whether that is right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import attemper
from attemper.watch.examine import NoAttentionCall

from . import Case

LEVELS = ("healthy", "ok", "note", "warn", "error", "critical", "diverging")


def accuses(finding: dict[str, Any]) -> bool:
    return LEVELS.index(finding["level"]) >= LEVELS.index("warn")


def scanned(build: Callable[[], nn.Module], batch: Callable[[], Any], declared: Sequence[str] = ()) -> dict[str, Any]:
    """What the scan says of a model: findings above *ok*, the checks that were skipped, the headline."""
    torch.manual_seed(0)
    model, inputs = build(), batch()
    with torch.no_grad():
        wild = any(
            not one.isfinite().all() for one in floats(called(copy.deepcopy(model).eval(), copy.deepcopy(inputs)))
        )
    torch.manual_seed(0)
    try:
        document = attemper.scan(model, inputs, deep=True, declared=dict.fromkeys(declared, True)).to_dict()
    except NoAttentionCall as error:
        return {"line": f"not judged: {error}", "findings": [], "skipped": [], "wild": wild}
    except Exception as error:
        line = f"the scan raised {type(error).__name__}: {str(error)[:300]}"
        return {"line": line, "findings": [], "skipped": [], "wild": wild}
    findings = [one for one in document["findings"] if LEVELS.index(one["level"]) > LEVELS.index("ok")]
    skipped = [one["name"] for one in document["checks"] if one["state"] != "passed" and one["state"] != "failed"]
    return {"line": document["verdict"]["line"], "findings": findings, "skipped": skipped, "wild": wild}


def called(model: nn.Module, inputs: Any) -> Any:
    return (
        model(**inputs) if isinstance(inputs, dict) else model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    )


def floats(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (list, tuple, dict)):
        for value in output.values() if isinstance(output, dict) else output:
            yield from floats(value)


def text(finding: dict[str, Any]) -> str:
    return f"{finding['name']} {finding.get('fault') or ''} {finding.get('title') or ''}: {finding['message']}"


def key(finding: dict[str, Any]) -> tuple[Any, ...]:
    return finding["name"], finding.get("fault")


TWINS: dict[Any, dict[str, Any]] = {}  # many faults have the same one


def judge_fault(case: Case) -> dict[str, Any]:
    found = scanned(case.build, case.batch)
    assert case.right is not None
    twin = case.right()
    same = (*map(type, twin.modules()), next(twin.parameters()).dtype, str(case.batch()))
    if same not in TWINS:
        TWINS[same] = scanned(case.right, case.batch)
    right = TWINS[same]
    known = {key(one) for one in right["findings"]}
    own = [one for one in found["findings"] if key(one) not in known]
    naming = [one for one in own if case.names(text(one))]
    if naming:
        state = "named right"
    elif any(accuses(one) for one in own):
        state = "named wrong"
    elif "not judged" in found["line"].lower() or found["line"].startswith("the scan raised"):
        state = "not judged"
    else:
        state = "called healthy" if found["line"].startswith("Healthy") else "missed"
    return {
        "state": state,
        "said": said(naming or own) or [found["line"]],
        "line": found["line"],
        "wild": found["wild"],
        "undecided": [one for one in case.check if one in found["skipped"]],
        "twin": said([one for one in right["findings"] if accuses(one)])
        + [right["line"]] * right["line"].startswith("the scan raised"),
        "source": case.source,
    }


def judge_innocent(case: Case) -> dict[str, Any]:
    found = scanned(case.build, case.batch)
    worst = [one for one in found["findings"] if accuses(one)]
    asked = {str(one.get("fault")) for one in worst}
    if worst and asked <= set(case.declared):  # what the finding says to declare settles it
        found = scanned(case.build, case.batch, case.declared)
        settled = not any(map(accuses, found["findings"]))
        worst = [one for one in found["findings"] if accuses(one)]
        if settled:
            return {"state": "declared", "said": sorted(asked), "noted": [], "line": found["line"]}
    raised = found["line"].startswith("the scan raised")
    return {
        "state": "accused" if worst or raised else "not judged" if found["line"].startswith("not judged") else "passed",
        "said": said(worst) if worst else [found["line"]] * raised,
        "noted": said([one for one in found["findings"] if one not in worst]),
        "line": found["line"],
    }


def said(findings: list[dict[str, Any]]) -> list[str]:
    """Each kind of finding once, with the first place."""
    first = {key(finding): finding for finding in reversed(findings)}
    return [
        f"{one['level']} {one.get('fault') or one['name']}, {one['layer'] or 'the model'}: {one['message'][:240]}"
        for one in reversed(first.values())
    ]
