"""What a record must hold: every sign of full matrices of logits, in float64, folded over the real rows of each head."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import attemper
import zoo
from close import in_float32, in_float64
from public.definition import HIDES, NOTHING, Arithmetic, Rounds, rows_of

MEANS = ("visible", "mean", "variance", "lse", "entropy", "sum_p2", "top_weight", "effective_keys", "jacobian_trace")


def folded(matrices: list[Tensor], keeps: list[Tensor | None]) -> list[dict[str, float]]:
    """A row for each head of the calls of one layer in one step: their rows together."""
    parts = []
    for logits, keep in zip(matrices, keeps, strict=True):
        z = logits.double()
        signs = rows_of(Arithmetic(Rounds()), z.masked_fill(z == NOTHING, 0.0), z != NOTHING, z > HIDES)
        real = torch.ones(z.shape[0], z.shape[2], dtype=torch.bool) if keep is None else keep
        signs["counted"] = (signs["visible"] > 0) & real[:, None, :]
        parts.append({name: one.transpose(0, 1).flatten(1) for name, one in signs.items() if name != "weights"})
    rows = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
    return [
        head_of({name: one[head][rows["counted"][head]] for name, one in rows.items()})
        for head in range(len(rows["mean"]))
    ]


def head_of(rows: dict[str, Tensor]) -> dict[str, float]:
    """The numbers of one head from its counted rows."""
    visible = rows["visible"]
    long = visible >= 8
    found = {name: rows[name].double().mean() for name in MEANS}
    found["evenness"] = rows["evenness"][visible > 1].mean()
    found["saturated"] = (rows["top_weight"][long] > 0.99).double().mean()
    found["peak"] = rows["peak"].max()
    found["rows"] = torch.tensor(float(len(visible)))
    return {name: one.item() for name, one in found.items()}


def kept(subject: zoo.Subject, matrices: list[Tensor]) -> list[Tensor | None]:
    """Which queries of each matrix are real."""
    return [{zoo.LENGTH: subject.keep, zoo.TARGETS: subject.targets}.get(one.shape[2]) for one in matrices]


def by_layer(rows: Iterable[dict[str, Any]]) -> dict[tuple[int, str, str], list[dict[str, Any]]]:
    found: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["step"], row["layer"], row["kind"]), []).append(row)
    return found


def assert_record(
    record: attemper.Record, expected: list[list[dict[str, float]]], size: float, exact: bool = True
) -> None:
    """Every row, in the order in which the layers ran; `size` is that of the largest logit, and a model is `exact` in float64."""
    found = by_layer(record.to_dicts())
    assert len(found) == len(expected), list(found)
    for place, heads in zip(found, expected, strict=True):
        assert [row["head"] for row in found[place]] == list(range(len(heads))), place
        for row, values in zip(found[place], heads, strict=True):
            assert set(values) <= set(row), set(values) - set(row)
            for name, value in values.items():
                room = size * size if name == "variance" else size
                near = in_float64(value, room) if exact else in_float32(value, 4096, room, size)
                assert row[name] == near, f"{place} head {row['head']} {name}: {row[name]} for {value}"


def largest(matrices: list[Tensor]) -> float:
    return max(1.0, *(one[one > HIDES].abs().max().item() for one in matrices if (one > HIDES).any()))


class Small(nn.Module):
    """Layers that attend by torch's SDPA, by attemper, and by torch's module; their logits can be asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.ours = nn.Linear(16, 3 * 16), attemper.MultiHeadAttention(16, 4, kv_heads=2, batch_first=True)
        self.torchs = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = self.fused(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mask = None if keep is None else keep[:, None, None, :]
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        hidden = None if keep is None else ~keep
        x = x + self.ours(x, key_padding_mask=hidden, need_weights=False)[0]
        return x + self.torchs(x, x, x, key_padding_mask=hidden, need_weights=False)[0]

    @torch.no_grad()
    def logits(self, x: Tensor, keep: Tensor | None = None) -> list[Tensor]:
        """Of the three layers, as they run on x."""

        def scores(q: Tensor, k: Tensor) -> Tensor:
            z = q @ k.mT / math.sqrt(q.shape[-1])
            return z if keep is None else z.masked_fill(~keep[:, None, None, :], NOTHING)

        def heads(one: Tensor, number: int) -> Tensor:
            return one.unflatten(-1, (number, -1)).transpose(1, 2)

        q, k, v = (heads(one, 4) for one in self.fused(x).chunk(3, -1))
        found = [scores(q, k)]
        x = x + (found[0].softmax(-1) @ v).transpose(1, 2).flatten(2)
        given = dict(self.ours.named_parameters())
        parts = zip(
            (given[f"{name}_proj_weight"] for name in "qkv"), given["in_proj_bias"].split((16, 8, 8)), strict=True
        )
        q, k, v = (nn.functional.linear(x, weight, bias) for weight, bias in parts)
        q, k, v = heads(q, 4), *(heads(one, 2).repeat_interleave(2, 1) for one in (k, v))
        found.append(scores(q, k))
        x = x + self.ours.out_proj((found[1].softmax(-1) @ v).transpose(1, 2).flatten(2))
        q, k, _ = nn.functional.linear(x, self.torchs.in_proj_weight, self.torchs.in_proj_bias).chunk(3, -1)
        return [*found, scores(heads(q, 4), heads(k, 4))]
