"""Faults of causal masks, windows, documents and padding, and leaks of the future past a right mask."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import GPT, HEADS, WIDTH, WORDS, Bidirectional, Block, Encoder, SelfAttention, fault, padded, tokens

HEAD = WIDTH // HEADS
FUTURE = ("future", "mask_direction")


class Fused(SelfAttention):
    """The fused call, which hides what `options` says."""

    def options(self, q: Tensor) -> dict:
        return {"is_causal": self.causal}

    def forward(self, x, attention_mask=None):
        q, k, v = self.project(x, x)
        q, k = self.place(q, k)
        return self.out_proj(self.join(F.scaled_dot_product_attention(q, k, v, **self.options(q))))


# causal masks


@fault("future", source="rasbt/LLMs-from-scratch#1061", check=("mask_direction",))
class MaskOfMHAInSDPA(Fused):
    def options(self, q):
        hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        return {"attn_mask": hidden}


class TorchLayers(GPT):
    """A decoder of torch's own layers."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def mask(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).triu(1)

    def forward(self, input_ids, attention_mask=None):
        hidden = None if attention_mask is None else attention_mask == 0
        x = self.blocks(
            self.embed(input_ids, attention_mask), mask=self.mask(input_ids.shape[1]), src_key_padding_mask=hidden
        )
        return self.lm_head(self.norm(x))


@fault("future", source="pytorch/examples#649", check=FUTURE)
class LowerTriangleForMHA(TorchLayers):
    """True is hidden there: a row sees itself and all that comes later."""

    def mask(self, length):
        return torch.ones(length, length, dtype=torch.bool).tril(-1)


@fault("mask", "nan", source="class: triu without diagonal=1")
class RowsThatSeeNothing(TorchLayers):
    """The first row may see no key at all, and no row its own."""

    def mask(self, length):
        return torch.ones(length, length, dtype=torch.bool).triu()


@fault("future", source="RVC-Boss/GPT-SoVITS#965", check=FUTURE)
class OneKeyTooMany(SelfAttention):
    def visible(self, scores):
        return torch.ones(scores.shape[-2:]).triu(diagonal=2) == 0


@fault("weak", "future", source="awslabs/gluonts#1401, Shujun-He/RibonanzaNet#5", check=("mask_strength", "future"))
class SignOfTheExponent(SelfAttention):
    def hide(self, scores, padding):
        return scores.masked_fill(~self.visible(scores), 1e-9)


@fault("weak", "future", source="karpathy/minGPT#75", check=("mask_strength", "future"))
class MaskOfMinusTen(SelfAttention):
    """Enough for small scores; these are large, as after training without a norm."""

    def __init__(self):
        super().__init__()
        nn.init.normal_(self.q_proj.weight, std=0.8)
        nn.init.normal_(self.k_proj.weight, std=0.8)

    def hide(self, scores, padding):
        return scores + (~self.visible(scores)) * -10.0


@fault("mode", "future", source="shiyu-coder/Kronos#199", check=("future",))
class CausalInTrainingAlone(Fused):
    def options(self, q):
        return {"is_causal": self.training}


@fault("mode", "future", source="class: is_causal = not training")
class CausalInEvaluationAlone(Fused):
    def options(self, q):
        return {"is_causal": not self.training}


@fault("batch", "future", "mask", source="huggingface/candle#3582", check=FUTURE)
class MaskOfTheFirstItem(SelfAttention):
    def hide(self, scores, padding):
        mask = torch.zeros(len(scores), 1, *scores.shape[-2:])
        mask[0] = torch.full(scores.shape[-2:], -torch.inf).triu(1)
        return scores + mask


@fault("future", source="huggingface/transformers#31673", check=FUTURE)
class WindowTimesMask(SelfAttention):
    """The mask is multiplied by the window's, which makes 0, that is visible, of all that is later."""

    def hide(self, scores, padding):
        lowest = torch.finfo(scores.dtype).min
        mask = torch.full(scores.shape[-2:], lowest).triu(1)
        return scores + (mask * torch.ones_like(mask).tril(-4) + torch.full_like(mask, lowest).tril(-4))


@fault("future", source="class: a window without its causal side", check=FUTURE)
class WindowOfBothSides(SelfAttention):
    def visible(self, scores):
        places = torch.arange(scores.shape[-1])
        return (places[:, None] - places[None, :]).abs() < 4


@fault("future", source="vllm-project/vllm#51257", check=("mask_agreement",))
class EveryOtherLayerSeesAll(GPT):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(SelfAttention()) for _ in range(3))
        self.blocks[1].attn.causal = False


# leaks of the future past a right mask


@fault("future", source="karpathy/nanochat#844 (1)", check=("future",))
class SummaryOfTheBlock(SelfAttention):
    """Every key takes the mean of its block of four tokens with it, later ones included."""

    def project(self, x, source):
        q, k, v = super().project(x, source)
        whole = x.shape[1] // 4 * 4
        mean = k[:, :, :whole].unflatten(2, (-1, 4)).mean(3, keepdim=True).expand(-1, -1, -1, 4, -1).flatten(2, 3)
        return q, torch.cat([k[:, :, :whole] + mean, k[:, :, whole:]], 2), v


@fault("future", source="karpathy/nanochat#844 (3)", check=("future",))
class SpectralFilter(SelfAttention):
    """A filter along the length, whose circular convolution wraps."""

    def __init__(self):
        super().__init__()
        self.response = nn.Parameter(torch.randn(WIDTH) * 0.3)

    def project(self, x, source):
        spectrum = torch.fft.rfft(x, dim=1)
        waves = torch.arange(spectrum.shape[1])[:, None] / spectrum.shape[1]
        x = torch.fft.irfft(spectrum * (1 + self.response * waves), n=x.shape[1], dim=1)
        return super().project(x, x)


@fault("future", source="seorim0/SE-using-SRL-Model#2", check=("future",))
class GroupNormOverFrames(GPT):
    def __init__(self):
        super().__init__()
        self.frames = nn.GroupNorm(4, WIDTH)

    def embed(self, input_ids, attention_mask):
        return self.frames(super().embed(input_ids, attention_mask).transpose(1, 2)).transpose(1, 2)


@fault("future", source="seorim0/SE-using-SRL-Model#2 (time attention)", check=("future",))
class GateOfTheWholeText(SelfAttention):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, attention_mask=None):
        return super().forward(x, attention_mask) * self.gate(x.mean(1, keepdim=True)).sigmoid()


@fault("future", source="maxim5/time-series-machine-learning#12", check=("future",))
class ConvolutionOfBothSides(GPT):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def embed(self, input_ids, attention_mask):
        x = super().embed(input_ids, attention_mask)
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2)


@fault("future", source="class: a token shift by roll, whose end wraps to the beginning", check=("future",))
class ShiftThatWraps(GPT):
    def embed(self, input_ids, attention_mask):
        x = super().embed(input_ids, attention_mask)
        return (x + x.roll(1, 1)) / 2


@fault("future", source="BorgwardtLab/multicenter-sepsis#11", check=("future",))
class StandardisedOverTime(GPT):
    """The series is standardised by its own whole mean and deviation, as in forecasting."""

    def embed(self, input_ids, attention_mask):
        x = super().embed(input_ids, attention_mask)
        return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5)


@fault(
    "future", source="class: statistics of the batch in training leak between positions", right=lambda: BatchNormed()
)
class BatchNormInTraining(GPT):
    """In training each channel is divided by its deviation over items and positions; in evaluation nothing is wrong."""

    def __init__(self):
        super().__init__()
        self.norm = self.normed()

    def normed(self) -> nn.Module:
        return OverLength()


class OverLength(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(WIDTH)

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class BatchNormed(BatchNormInTraining):
    def normed(self):
        return nn.LayerNorm(WIDTH)


# windows and documents


class Window(SelfAttention):
    def __init__(self):
        super().__init__()
        self.sliding_window = 4

    def visible(self, scores):
        places = torch.arange(scores.shape[-1])
        return super().visible(scores) & (places[:, None] - places[None, :] < self.sliding_window)


@fault("window", source="ml-explore/mlx-lm#390")
class WindowOfOneMore(Window):
    """Its own key and four more, where others mean four in all."""

    def visible(self, scores):
        places = torch.arange(scores.shape[-1])
        return SelfAttention.visible(self, scores) & (places[:, None] - places[None, :] <= self.sliding_window)


@fault("window", source="unslothai/unsloth#8253")
class WindowThatIsNotPassed(Window):
    def visible(self, scores):
        return SelfAttention.visible(self, scores)


class PackedGPT(GPT):
    """Several documents in a row: positions begin again with each, and `document_ids` says which is whose."""

    def seen(self, document_ids: Tensor) -> Tensor:
        same = document_ids[:, :, None] == document_ids[:, None, :]
        return same & torch.ones(same.shape[-2:], dtype=torch.bool).tril()

    def forward(self, input_ids, position_ids, document_ids):
        x = self.wte(input_ids) + self.wpe(position_ids)
        seen = self.seen(document_ids)[:, None]
        for block in self.blocks:
            q, k, v = block.attn.project(block.norm1(x), block.norm1(x))
            x = x + block.attn.out_proj(block.attn.join(F.scaled_dot_product_attention(q, k, v, attn_mask=seen)))
            x = x + block.mlp(block.norm2(x))
        return self.lm_head(self.norm(x))


def packed():
    lengths = (5, 4, 3)
    return {
        **tokens(2, 12)(),
        "position_ids": torch.cat([torch.arange(one) for one in lengths]).expand(2, -1),
        "document_ids": torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(2, -1),
    }


@fault("documents", source="huggingface/nanoVLM#204, DeepOpt-com/WrinkleFree-Monorepo#53", batch=packed)
class DocumentsSeeOneAnother(PackedGPT):
    def seen(self, document_ids):
        length = document_ids.shape[1]
        return torch.ones(1, length, length, dtype=torch.bool).tril()


@fault(
    "documents", "future", source="class: documents kept apart, and not causal within one", batch=packed, check=FUTURE
)
class DocumentsWithoutCausal(PackedGPT):
    def seen(self, document_ids):
        return document_ids[:, :, None] == document_ids[:, None, :]


class Shifted(nn.Module):
    """Attention in windows of four of a row of tokens that is shifted by two: what the shift brings together is kept apart."""

    def __init__(self):
        super().__init__()
        self.attn = Bidirectional()

    def areas(self, length: int) -> Tensor:
        return torch.cat([torch.zeros(length - 2), torch.ones(2)]).long()

    def back(self, x: Tensor) -> Tensor:
        return x.roll(2, 1)

    def forward(self, x, attention_mask=None):
        items, length, _ = x.shape
        area = self.areas(length).view(-1, 4)
        seen = (area[:, :, None] == area[:, None, :]).repeat(items, 1, 1)[:, None]
        cut = x.roll(-2, 1).reshape(-1, 4, WIDTH)
        q, k, v = self.attn.project(cut, cut)
        out = self.attn.join(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))
        return self.back(self.attn.out_proj(out).view(items, length, WIDTH))


@fault("mask", "window", source="huggingface/pytorch-image-models#2438", right=lambda: Encoder(Shifted))
class ShiftWithoutItsMask(Encoder):
    def __init__(self):
        super().__init__(Open)


class Open(Shifted):
    def areas(self, length):
        return torch.zeros(length).long()


@fault(
    "positions",
    "window",
    "heads",
    source="class: windows rolled the same way twice",
    right=lambda: Encoder(Shifted),
    check=("position",),
)
class ShiftedTwice(Encoder):
    def __init__(self):
        super().__init__(Away)


class Away(Shifted):
    def back(self, x):
        return x.roll(-2, 1)


# padding


class PaddedMHA(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def options(self, attention_mask: Tensor) -> dict:
        return {"key_padding_mask": attention_mask == 0}

    def forward(self, x, attention_mask=None):
        options = {} if attention_mask is None else self.options(attention_mask)
        return self.inner(x, x, x, need_weights=False, **options)[0]


def encoder_of(layer):
    return lambda: Encoder(layer)


@fault(
    "padding",
    source="speechbrain/speechbrain#2276",
    right=encoder_of(PaddedMHA),
    batch=padded(),
    check=("mask_padding", "padding"),
)
class PaddingInverted(Encoder):
    def __init__(self):
        super().__init__(Inverted)


class Inverted(PaddedMHA):
    def options(self, attention_mask):
        return {"key_padding_mask": attention_mask.bool()}


@fault(
    "padding",
    "weak",
    source="pytorch/pytorch#21518",
    right=encoder_of(PaddedMHA),
    batch=padded(),
    check=("mask_padding", "padding"),
)
class PaddingMaskAsFloats(Encoder):
    """A float mask is added: 1 for words, 0 for padding."""

    def __init__(self):
        super().__init__(Added)


class Added(PaddedMHA):
    def options(self, attention_mask):
        return {"key_padding_mask": attention_mask.float()}


@fault("padding", source="hyunwoongko/transformer#40", batch=padded(), check=("mask_padding", "padding"))
class PaddingHidesRows(Bidirectional):
    def hide(self, scores, padding):
        return scores if padding is None else scores.masked_fill(padding[:, None, :, None] == 0, -1e9)


@fault("padding", source="aimagelab/meshed-memory-transformer#27", batch=padded(), check=("mask_padding", "padding"))
class PaddingSetToZero(Bidirectional):
    """Padded inputs and outputs are 0, and their keys, which have a bias, still take their share."""

    def forward(self, x, attention_mask=None):
        kept = 1 if attention_mask is None else attention_mask[..., None]
        return super().forward(x * kept) * kept


@fault("nan", "padding", source="huggingface/transformers#17306, pytorch/pytorch#24816", batch=padded(left=True))
class MinusInfinityOnTheLeft(SelfAttention):
    """Padding on the left leaves its own rows without a key, their numbers are NaN, and 0 · NaN is NaN in the next layer."""

    def hide(self, scores, padding):
        scores = scores.masked_fill(~self.visible(scores), -torch.inf)
        return scores if padding is None else scores.masked_fill(padding[:, None, None, :] == 0, -torch.inf)


@fault(
    "nan",
    "dtype",
    "mask",
    source="huggingface/transformers#17306, NVIDIA-NeMo/Automodel#2658",
    right=lambda: Halved(SelfAttention),
    batch=padded(left=True),
)
class LowestNumberPlusScore(GPT):
    """In float16 the lowest number less 16 is −∞, as is the sum of two: a row of padding on the left sees nothing, and is NaN."""

    def __init__(self):
        super().__init__(SumOfMasks)
        for block in self.blocks:
            nn.init.constant_(block.attn.q_proj.bias, 4.0)
            nn.init.constant_(block.attn.k_proj.bias, -4.0)
        self.half()


class SumOfMasks(SelfAttention):
    def hide(self, scores, padding):
        lowest = torch.finfo(scores.dtype).min
        mask = torch.full(scores.shape[-2:], lowest, dtype=scores.dtype).triu(1)
        if padding is not None:
            mask = mask + (padding[:, None, None, :] == 0) * torch.tensor(lowest, dtype=scores.dtype)
        return scores + mask


class Halved(GPT):
    def __init__(self, attention):
        super().__init__(attention)
        self.half()


@fault(
    "padding",
    "positions",
    source="unslothai/unsloth#3699, ndif-team/nnsight#673",
    batch=padded(left=True),
    check=("padding",),
)
class PositionsCountPadding(GPT):
    def embed(self, input_ids, attention_mask):
        return super().embed(input_ids, None)


class Classifier(Encoder):
    """Two classes, from the mean of the words."""

    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, 2)

    def pool(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return (x * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids, attention_mask)
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.lm_head(self.pool(self.norm(x), attention_mask))


@fault("padding", source="huggingface/transformers#17463", batch=padded(), check=("padding",))
class MeanOfPadding(Classifier):
    def pool(self, x, attention_mask):
        return x.mean(1)


@fault("padding", source="class: the last token of a batch padded on the right", batch=padded(), check=("padding",))
class LastTokenIsPadding(Classifier):
    def pool(self, x, attention_mask):
        return x[:, -1]


class Translator(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH), nn.Linear(WIDTH, WORDS)
        self.body = nn.Transformer(WIDTH, HEADS, 1, 1, 64, 0.0, batch_first=True)

    def put(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.places(torch.arange(ids.shape[1]))

    def options(self, attention_mask: Tensor, length: int) -> dict:
        hidden = attention_mask == 0
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        return {"tgt_mask": mask, "src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        options = self.options(attention_mask, decoder_input_ids.shape[1])
        return self.out(self.body(self.put(input_ids), self.put(decoder_input_ids), **options))


def pair():
    return {
        **padded()(),
        "decoder_input_ids": torch.randint(3, WORDS, (2, 7), generator=torch.Generator().manual_seed(12)),
    }


@fault("padding", source="facebookresearch/fairseq#318", batch=pair, check=("mask_padding", "padding"))
class MemoryWithoutItsMask(Translator):
    def options(self, attention_mask, length):
        return super().options(attention_mask, length) | {"memory_key_padding_mask": None}


@fault("future", source="class: a decoder's mask forgotten", batch=pair, check=("future", "mask_direction"))
class TargetWithoutItsMask(Translator):
    def options(self, attention_mask, length):
        return super().options(attention_mask, length) | {"tgt_mask": None}


@fault("weak", "future", "scale", source="class: a mask that the scale divides too", check=("mask_strength",))
class MaskDividedToo(SelfAttention):
    """The mask of −10 is added before the scale and the temperature divide it."""

    def score(self, q, k):
        return q @ k.transpose(-2, -1)

    def hide(self, scores, padding):
        return (scores + (~self.visible(scores)) * -10.0) / math.sqrt(HEAD)
