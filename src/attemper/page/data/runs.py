"""runs: what the bench shows of training: the recorded runs of the small language model, with 1/√d_k and without a scale."""

from __future__ import annotations

from typing import Any

from ...lab import stored

COLUMNS = ("loss", "effective_keys", "top_weight", "grad_q_median", "grad_q_rms")


def recorded_runs() -> dict[str, Any]:
    """The runs, one entry for each rule, learning rate and seed, with a list for each column."""
    rows = stored.rows()
    runs: dict[tuple[str, float, int], dict[str, Any]] = {}
    for row in rows:
        name = (row["rule"], row["lr"], row["seed"])
        run = runs.setdefault(name, {"rule": row["rule"], "lr": row["lr"], "step": [], **{key: [] for key in COLUMNS}})
        for key in ("step", *COLUMNS):
            run[key].append(row[key])
    first = rows[0]
    return {
        "d_k": first["d_model"] // first["heads"],
        "layers": first["layers"],
        "steps": first["steps"],
        "lrs": sorted({row["lr"] for row in rows}),
        "runs": list(runs.values()),
    }
