"""Faults of the softmax, of the scale, and of how heads are cut and joined."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import HEADS, WIDTH, Bidirectional, SelfAttention, fault, tokens

HEAD = WIDTH // HEADS


# the softmax


@fault("axis", source="labmlai/annotated_deep_learning_paper_implementations#146", check=("softmax_axis",))
class SoftmaxOverQueriesOfAnEinsum(Bidirectional):
    def forward(self, x, attention_mask=None):
        q, k, v = (part(x).view(*x.shape[:2], HEADS, HEAD) for part in (self.q_proj, self.k_proj, self.v_proj))
        weights = (torch.einsum("bihd,bjhd->bijh", q, k) / math.sqrt(HEAD)).softmax(dim=1)  # j, the keys, is 2
        return self.out_proj(torch.einsum("bijh,bjhd->bihd", weights, v).flatten(2))


@fault("axis", "future", source="haohy/TCAN#7", check=("softmax_axis", "future"))
class SoftmaxDownTheColumns(SelfAttention):
    """Each weight is divided by a sum over later queries, so the mask does not keep the future out."""

    def weigh(self, scores, padding):
        return self.hide(scores, padding).softmax(-2)


@fault("axis", source="facebookresearch/detr#247", check=("softmax_axis",))
class SoftmaxOverHeadsAndKeys(Bidirectional):
    def weigh(self, scores, padding):
        batch, heads, queries, keys = scores.shape
        flat = scores.transpose(1, 2).reshape(batch, queries, heads * keys).softmax(-1)
        return flat.view(batch, queries, heads, keys).transpose(1, 2)


@fault("axis", "batch", source="FudanNLP/fastNLP#254", check=("softmax_axis", "batch"))
class SoftmaxWithoutDim(Bidirectional):
    def weigh(self, scores, padding):
        # three dimensions, so the implicit one is the first: heads of all items
        return F.softmax(self.hide(scores, padding).flatten(0, 1)).view_as(scores)


@fault("axis", "rows", source="jacobgil/vit-explain#16", check=("row_sums", "softmax_axis"))
class NormalisedTwiceOverTheWrongSum(Bidirectional):
    def weigh(self, scores, padding):
        weights = super().weigh(scores, padding)
        return weights / weights.sum(1, keepdim=True)  # over the heads


@fault("rows", "future", source="huggingface/pytorch-image-models#2236", check=("row_sums",))
class MaskTimesWeights(SelfAttention):
    def weigh(self, scores, padding):
        return scores.softmax(-1) * self.visible(scores)


@fault("rows", source="zyy-2001/DisKT#6", check=("softmax_once",))
class SoftmaxOfWeights(SelfAttention):
    def weigh(self, scores, padding):
        weights = super().weigh(scores, padding)
        return F.softmax(weights, dim=-1)


@fault(
    "rows",
    "effect",
    source="class: a bias added after the softmax",
    right=lambda: BiasAddedToScores(),
    check=("row_sums",),
)
class BiasAddedToWeights(Bidirectional):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HEADS, 64, 64) * 0.1)

    def weigh(self, scores, padding):
        return super().weigh(scores, padding) + self.bias[:, : scores.shape[-2], : scores.shape[-1]]


class BiasAddedToScores(BiasAddedToWeights):
    def weigh(self, scores, padding):
        return Bidirectional.weigh(self, scores + self.bias[:, : scores.shape[-2], : scores.shape[-1]], padding)


@fault("weak", "future", source="georg-wolflein/good-features#1", check=("mask_strength", "future"))
class MaskTimesScores(SelfAttention):
    def hide(self, scores, padding):
        return scores * self.visible(scores)  # a score of 0 is no small score


@fault("random", "rows", source="karpathy/nanoGPT#240", check=("dropout",))
class DropoutThatStays(SelfAttention):
    def weigh(self, scores, padding):
        return F.dropout(super().weigh(scores, padding), 0.1)


@fault("random", "rows", source="speechbrain/speechbrain#2888", check=("dropout",))
class DropoutOfTheFusedCall(SelfAttention):
    def forward(self, x, attention_mask=None):
        q, k, v = self.project(x, x)
        return self.out_proj(self.join(F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)))


# the scale


@fault("scale", source="Graylab/DL4Proteins-notebooks#12", check=("scale",))
class ScaleOfTheWholeWidth(SelfAttention):
    def score(self, q, k):
        return q @ k.transpose(-2, -1) * WIDTH**-0.5


@fault("scale", source="tenstorrent/tt-metal#56789", check=("scale",))
class ScaleOfTheNumberOfHeads(SelfAttention):
    def score(self, q, k):
        return q @ k.transpose(-2, -1) / math.sqrt(HEADS)


@fault("scale", source="class: √L for √d_k, read from k after it was transposed", check=("scale",))
class ScaleOfTheLength(SelfAttention):
    def score(self, q, k):
        k = k.transpose(-2, -1)
        return q @ k / math.sqrt(k.size(-1))


@fault("scale", source="esceptico/perceiver-io#9", check=("scale",))
class DividedByTheScale(Bidirectional):
    def __init__(self):
        super().__init__()
        self.scale = HEAD**-0.5

    def score(self, q, k):
        return q @ k.transpose(-2, -1) / self.scale


@fault("scale", source="class: double scaling", check=("scale",))
class ScaledBeforeTheFusedCall(SelfAttention):
    def forward(self, x, attention_mask=None):
        q, k, v = self.project(x, x)
        return self.out_proj(self.join(F.scaled_dot_product_attention(q * HEAD**-0.5, k, v, is_causal=True)))


@fault("scale", "rows", source="FrancescoSaverioZuppichini/ViT#2", check=("scale", "row_sums"))
class ScaledAfterTheSoftmax(Bidirectional):
    def weigh(self, scores, padding):
        return self.hide(scores * math.sqrt(HEAD), padding).softmax(-1) / math.sqrt(HEAD)


@fault(
    "scale",
    "effect",
    source="class: a configured scale that does not reach the computation",
    right=lambda: Passed(),
    check=("scale",),
)
class ScaleThatIsNotPassed(SelfAttention):
    """Its own scale is for longer texts; the fused call has its default."""

    def __init__(self):
        super().__init__()
        self.softmax_scale = HEAD**-0.5 * math.log(2048, 64)

    def options(self) -> dict:
        return {}

    def forward(self, x, attention_mask=None):
        q, k, v = self.project(x, x)
        return self.out_proj(self.join(F.scaled_dot_product_attention(q, k, v, is_causal=True, **self.options())))


class Passed(ScaleThatIsNotPassed):
    def options(self):
        return {"scale": self.softmax_scale}


class OneHead(Bidirectional):
    """One head of the whole width, and projections as large as their inputs: logits of standard deviation √d without a scale."""

    def __init__(self):
        super().__init__()
        for part in (self.q_proj, self.k_proj):
            nn.init.normal_(part.weight, std=WIDTH**-0.5)

    def split(self, x):
        return x[:, None]


@fault("scale", source="deepjavalibrary/d2l-java#186", check=("scale",))
class NoScale(OneHead):
    def score(self, q, k):
        return q @ k.transpose(-2, -1)


# heads


@fault("heads", source="reczoo/FuxiCTR#30", check=("head_layout", "position"))
class HeadsCutByAView(Bidirectional):
    def forward(self, x, attention_mask=None):
        q, k, v = (part(x).view(len(x) * HEADS, -1, HEAD) for part in (self.q_proj, self.k_proj, self.v_proj))
        weights = (q @ k.transpose(1, 2) / math.sqrt(HEAD)).softmax(-1)
        return self.out_proj((weights @ v).view(len(x), -1, WIDTH))


@fault(
    "heads", source="jsbaan/transformer-from-scratch#4, ajhalthor/Transformer-Neural-Network#4", check=("head_layout",)
)
class HeadsJoinedByAReshape(SelfAttention):
    def join(self, x):
        return x.contiguous().view(x.shape[0], x.shape[2], WIDTH)


@fault("heads", source="class: heads joined in the wrong order", check=("head_layout",))
class HeadsJoinedInnermost(SelfAttention):
    """Number d·4 + h of a row is number d of head h, where the projections have h·8 + d: weights of others do not fit."""

    def join(self, x):
        return x.permute(0, 2, 3, 1).flatten(2)


@fault(
    "heads", "future", source="leaderj1001/Attention-Augmented-Conv2d#21", check=("head_layout", "position", "future")
)
class KeysReshapedToTheirTranspose(SelfAttention):
    def score(self, q, k):
        return q @ k.reshape(*k.shape[:2], k.shape[3], k.shape[2]) / math.sqrt(HEAD)


class Grouped(SelfAttention):
    """Two heads of keys and values for four of queries."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.num_key_value_heads = HEADS, 2
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, HEAD * self.num_key_value_heads) for _ in range(2))

    def split(self, x):
        return x.view(*x.shape[:2], -1, HEAD).transpose(1, 2)

    def spread(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)

    def project(self, x, source):
        q, k, v = super().project(x, source)
        return q, *self.spread(k, v)


@fault("heads", source="onnx/onnx#7274")
class KeyHeadsTiled(Grouped):
    """Heads 0, 1, 0, 1 for 0, 0, 1, 1: right for its own training, wrong for the weights of any other code."""

    def spread(self, k, v):
        return k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)


@fault("heads", source="class: keys and values of different groups")
class ValuesOfAnotherGroup(Grouped):
    def spread(self, k, v):
        return k.repeat_interleave(2, 1), v.repeat(1, 2, 1, 1)


@fault(
    "heads",
    "positions",
    "batch",
    source="PKU-YuanGroup/Open-Sora-Plan#171",
    right=lambda: Frames(),
    batch=lambda: clip(),
    check=("batch", "position"),
)
class FramesCutByAReshape(nn.Module):
    """Attention within each frame of a clip (b, c, t, h, w): channels and frames are mixed up before it."""

    def __init__(self):
        super().__init__()
        self.attn = Bidirectional()

    def frames(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0] * x.shape[2], WIDTH, -1)

    def forward(self, x):
        b, c, t, h, w = x.shape
        out = self.attn(self.frames(x).transpose(1, 2)).transpose(1, 2)
        return out.reshape(b, t, c, h, w).transpose(1, 2)


class Frames(FramesCutByAReshape):
    def frames(self, x):
        return x.transpose(1, 2).flatten(0, 1).flatten(2)


def clip():
    return {"x": torch.randn(2, WIDTH, 3, 4, 4, generator=torch.Generator().manual_seed(5))}


@fault(
    "batch",
    "heads",
    source="class: a view to (length, batch · heads, width) of an input that is batch-first",
    check=("batch",),
)
class LengthFirstViewOfBatchFirst(Bidirectional):
    def forward(self, x, attention_mask=None):
        items, length, _ = x.shape
        q, k, v = (
            part(x).contiguous().view(length, items * HEADS, HEAD).transpose(0, 1)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        weights = (q @ k.transpose(1, 2) / math.sqrt(HEAD)).softmax(-1)
        return self.out_proj((weights @ v).transpose(0, 1).contiguous().view(items, length, WIDTH))


@fault(
    "batch",
    source="IBM/TabFormer#14, songyangco/GETNext#2",
    right=lambda: Stack(True),
    batch=tokens(3, 12),
    check=("batch",),
)
class LengthFirstByDefault(nn.Module):
    """Words are (batch, length), and torch's layer takes (length, batch, width) if it is not told otherwise."""

    def __init__(self, batch_first: bool = False):
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(80, WIDTH), nn.Embedding(64, WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)

    def forward(self, input_ids):
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        return self.norm(x + self.attn(x, x, x, need_weights=False)[0])


Stack = LengthFirstByDefault


@fault("scale", "effect", source="class: the norm of q applied to k, the norm of k never", right=lambda: Normed())
class NormOfKForgotten(SelfAttention):
    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)
        nn.init.normal_(self.q_norm.weight, 1, 0.2)
        nn.init.normal_(self.k_norm.weight, 1, 0.2)

    def place(self, q, k):
        return self.q_norm(q), self.q_norm(k)


class Normed(NormOfKForgotten):
    def place(self, q, k):
        return self.q_norm(q), self.k_norm(k)
