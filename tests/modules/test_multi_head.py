"""MultiHeadAttention against torch.nn.MultiheadAttention, and every rule against a plain float64 definition."""

import copy
import itertools

import pytest
import torch
from torch import nn

import attemper
from cases import cover
from close import assert_float64
from judge import assert_as_exact, assert_within

ROUNDING = torch.finfo(torch.float32).eps


def twins(seed: int = 0, dtype=torch.float32, **options):
    """torch's module with random parameters, and ours loaded from its state dict."""
    torch.manual_seed(seed)
    theirs = nn.MultiheadAttention(24, 4, dtype=dtype, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = attemper.MultiHeadAttention(24, 4, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def masks(kind: str, padding: str, batch: int, rows: int, keys: int) -> dict:
    """Arguments of torch's forward; no row is left without a key."""
    found: dict = {}
    hidden = torch.rand(rows, keys) < 0.3
    hidden[:, 0] = False
    if kind == "bool":
        found["attn_mask"] = hidden
    elif kind == "per head":
        found["attn_mask"] = (torch.rand(batch * 4, rows, keys) < 0.3).index_fill(-1, torch.tensor([0]), False)
    elif kind == "added":
        found["attn_mask"] = torch.randn(rows, keys).masked_fill(hidden, float("-inf"))
    elif kind == "causal":
        found |= {"attn_mask": nn.Transformer.generate_square_subsequent_mask(rows)[:, :keys], "is_causal": True}
    if padding == "bool":
        found["key_padding_mask"] = (torch.arange(keys) >= torch.randint(1, keys + 1, (batch, 1))).expand(batch, keys)
    elif padding == "added":
        found["key_padding_mask"] = torch.randn(batch, keys)
    return found


GRID = {
    "kind": ["none", "bool", "per head", "added", "causal"],
    "padding": ["none", "bool", "added"],
    "extras": [False, True],
    "inputs": ["self", "cross", "widths"],
    "batch_first": [False, True],
}
# torch's causal masks are square
CASES = cover(GRID, lambda case: case["kind"] != "causal" or case["inputs"] == "self")


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_equals_torch(case):
    equals_torch(**case)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask")
def test_equals_torch_on_the_whole_grid():
    for values in itertools.product(*GRID.values()):
        case = dict(zip(GRID, values, strict=True))
        if case["kind"] != "causal" or case["inputs"] == "self":
            equals_torch(**case)


def equals_torch(kind, padding, extras, inputs, batch_first):
    batch, rows, keys = 2, 5, 5 if inputs == "self" else 9
    options = {
        "batch_first": batch_first,
        "add_bias_kv": extras,
        "add_zero_attn": extras,
        "bias": not extras or kind == "none",
    }
    if inputs == "widths":
        options |= {"kdim": 10, "vdim": 14}
    theirs, ours = twins(**options)
    exact = copy.deepcopy(theirs).double()
    torch.manual_seed(5)
    query = torch.randn(batch, rows, 24)
    key = query if inputs == "self" else torch.randn(batch, keys, options.get("kdim", 24))
    value = query if inputs == "self" else torch.randn(batch, keys, options.get("vdim", 24))
    asked = masks(kind, padding, batch, rows, keys)
    cotangent = torch.randn(batch, rows, 24)

    # told is_causal, torch hides its appended keys from all rows when it needs no weights, and shows them when it does
    torch_is_of_two_minds = extras and kind == "causal" and padding == "none"
    for need_weights in (True,) if torch_is_of_two_minds else (False, True):
        results = []
        for module in (ours, exact, theirs):
            dtype = module.out_proj.weight.dtype
            leaves = [
                t.detach().to(dtype).requires_grad_() for t in ((query,) if inputs == "self" else (query, key, value))
            ]
            given = leaves * 3 if inputs == "self" else leaves
            if not batch_first:
                given = [t.transpose(0, 1) for t in given] if inputs != "self" else [leaves[0].transpose(0, 1)] * 3
            arguments = {
                n: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in asked.items()
            }
            output, weights = module(*given, need_weights=need_weights, average_attn_weights=False, **arguments)
            output = output if batch_first else output.transpose(0, 1)
            loss = (output * cotangent.to(dtype)).sum()
            named = dict(module.named_parameters())
            grads = torch.autograd.grad(loss, [*leaves, *named.values()])
            results.append((output, weights, dict(zip([*"qkv"[: len(leaves)], *named], grads, strict=True))))
        (output, weights, grads), (exact_output, exact_weights, exact_grads), (plain, plain_weights, plain_grads) = (
            results
        )
        assert_within("output", output, exact_output.detach(), plain, ROUNDING)
        for name, grad in grads.items():
            assert_within(
                f"d/d{name}", grad, exact_grads[name], plain_grads[name], ROUNDING * exact_grads[name].abs().max()
            )
        if need_weights:
            assert_within("weights", weights, exact_weights.detach(), plain_weights, ROUNDING)
        else:
            assert weights is None is plain_weights


def test_appended_keys_are_seen_by_every_row_with_weights_and_without():
    _, ours = twins(dtype=torch.float64, batch_first=True, add_bias_kv=True, add_zero_attn=True)
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    assert_float64(ours(x, is_causal=True)[0], ours(x, is_causal=True, need_weights=False)[0])


def test_weights_are_averaged_as_in_torch():
    theirs, ours = twins(dtype=torch.float64, batch_first=True)
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    assert_float64(ours(x, x, x)[1], theirs(x, x, x)[1])
    assert ours(x, x, x)[1].shape == (2, 5, 5)
    alone = ours(x[0], x[0], x[0])
    assert_float64(alone, theirs(x[0], x[0], x[0]))
    assert alone[1].shape == (5, 5)


@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 6}, {"add_bias_kv": True}, {"bias": False}])
def test_one_seed_draws_the_same_parameters(options):
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(24, 4, **options).state_dict()
    torch.manual_seed(3)
    ours = attemper.MultiHeadAttention(24, 4, **options).state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def definition(module: attemper.MultiHeadAttention, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Heads, weights and every sign, with the whole matrix in memory; the rules are written out here a second time."""
    heads, groups, d = module.num_heads, module.kv_heads, module.head_dim
    if module.in_proj_weight is not None:
        matrices = module.in_proj_weight.chunk(3)
    else:
        matrices = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = module.in_proj_bias.split([len(m) for m in matrices])
    q, k, v = (
        (x @ m.T + b).unflatten(-1, (n, d)).transpose(1, 2)
        for m, b, n in zip(matrices, biases, (heads, groups, groups), strict=True)
    )
    k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
    gain = 1.0 if module.gain is None else module.gain[:, None, None]
    visible = mask.sum(-1)[..., None]
    dot = q @ k.mT
    cosine = dot / (q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :])
    z = {
        "sqrt_dk": lambda: dot / d**0.5,
        "none": lambda: dot,
        "dk": lambda: dot / d,
        "sqrt_dmodel": lambda: dot / (heads * d) ** 0.5,
        "layer": lambda: dot / (3 * d**0.5),
        "log_n": lambda: gain * visible.log() * dot / d**0.5,
        "learned": lambda: gain * dot / d**0.5,
        "qk_norm": lambda: gain * d**0.5 * cosine,
        "softcap": lambda: 50 * torch.tanh(dot / d**0.5 / 50),
    }[module.rule.name]()
    shut = ~mask.expand(z.shape)
    p = z.masked_fill(shut, float("-inf")).softmax(-1)
    seen = z.masked_fill(shut, 0.0)
    mean = seen.sum(-1) / visible[..., 0]
    lse = z.masked_fill(shut, float("-inf")).logsumexp(-1)
    output = (p @ v).transpose(1, 2).flatten(2) @ module.out_proj.weight.T + module.out_proj.bias
    return {
        "output": output,
        "mean": mean,
        "variance": ((seen - mean[..., None]) ** 2).masked_fill(shut, 0.0).sum(-1) / visible[..., 0],
        "peak": z.masked_fill(shut, float("-inf")).amax(-1),
        "lse": lse,
        "entropy": lse - (p * seen).sum(-1),
        "sum_p2": (p * p).sum(-1),
    }


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", attemper.RULES)
def test_every_rule_is_its_definition(name, kv_heads):
    torch.manual_seed(0)
    ours = attemper.MultiHeadAttention(24, 4, rule=name, layer=2, kv_heads=kv_heads, batch_first=True)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 11, 24)
    keep = torch.ones(11, 11, dtype=torch.bool).tril() & (torch.arange(11) < torch.tensor([11, 6])[:, None, None, None])
    found = {}
    for key, dtype in (("exact", torch.float64), ("plain", torch.float32)):
        module = copy.deepcopy(ours).to(dtype)
        found[key] = definition(module, x.to(dtype), keep), dict(module.named_parameters())
    output, vitals = ours(x, key_padding_mask=~keep[:, 0, -1], is_causal=True, signs="all")
    actual = {"output": output} | {sign: getattr(vitals, sign) for sign in found["exact"][0] if sign != "output"}
    parameters = dict(ours.named_parameters())
    for sign, value in actual.items():
        exact, plain = found["exact"][0][sign], found["plain"][0][sign]
        assert_within(sign, value, exact.detach(), plain, ROUNDING)
        cotangent = torch.randn_like(exact)
        grads = []
        for result, leaves in ((value, parameters), (exact, found["exact"][1]), (plain, found["plain"][1])):
            loss = (result * cotangent.to(result.dtype)).sum()
            grads.append(torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True))
        # a parameter's gradient is a sum over rows and keys that may cancel (a key's bias shifts all logits of a row alike)
        largest = max(g.abs().max().item() for g in grads[1] if g is not None)
        # each term holds a weight, into which the rounding of its logit goes through exp, as in tests/rounding.py
        through_exp = 1 + found["exact"][0]["peak"].abs().max().item()
        rounding = ROUNDING * largest * through_exp * (x.shape[0] * x.shape[1] ** 2) ** 0.5
        for leaf, ours_grad, exact_grad, plain_grad in zip(parameters, *grads, strict=True):
            if exact_grad is None or ours_grad is None:
                assert exact_grad is None or not exact_grad.any(), f"d({sign})/d({leaf}) did not arrive"
                continue
            assert_within(f"d({sign})/d({leaf})", ours_grad, exact_grad, plain_grad, rounding)


def test_from_torch_shares_the_parameters():
    theirs, _ = twins(dtype=torch.float64, batch_first=True, dropout=0.1)
    theirs.eval()
    ours = attemper.MultiHeadAttention.from_torch(theirs, rule="learned")
    shared = dict(theirs.named_parameters())
    assert {name for name, p in ours.named_parameters() if p is shared.get(name)} == set(shared)
    assert not ours.training
    assert ours.dropout == 0.1
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    assert_float64(ours(x, x, x), theirs(x, x, x))


class TestInsideTorchModels:
    """Where torch's own classes hold the module, and would rather run their fused path in eval mode."""

    def swapped(self, rule="sqrt_dk", **options):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(24, 4, 32, batch_first=True, dropout=0.0)
        stock = nn.TransformerEncoder(layer, 2, **options).eval()
        ours = copy.deepcopy(stock)
        for block in ours.layers:
            block.self_attn = attemper.MultiHeadAttention.from_torch(block.self_attn, rule=rule, signs="all")
        return stock, ours

    @pytest.mark.parametrize("nested", [False, True])
    @pytest.mark.parametrize("grad", [False, True])
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_encoder_in_eval(self, nested, grad):
        stock, ours = self.swapped(enable_nested_tensor=nested)
        x = torch.randn(3, 6, 24)
        padding = torch.arange(6) >= torch.tensor([6, 4, 2])[:, None]
        with torch.set_grad_enabled(grad):
            expected, found = (model(x, src_key_padding_mask=padding) for model in (stock, ours))
        exact = copy.deepcopy(stock).double()(x.double(), src_key_padding_mask=padding)
        assert_as_exact("output", found[~padding], [expected[~padding]], exact[~padding])
        assert ours.layers[1].self_attn.vitals.visible[1, 0].tolist() == [4] * 6

    def test_the_rule_is_not_skipped_in_eval(self):
        stock, ours = self.swapped(rule="none", enable_nested_tensor=False)
        x = torch.randn(3, 6, 24)
        with torch.no_grad():
            assert (ours(x) - stock(x)).abs().max() > 1e-3
        assert ours.layers[0].self_attn.vitals is not None

    def test_decoder_cross_attention_and_training(self):
        torch.manual_seed(0)
        stock = nn.TransformerDecoderLayer(24, 4, 32, batch_first=True, dropout=0.0)
        ours = copy.deepcopy(stock)
        for name in ("self_attn", "multihead_attn"):
            setattr(ours, name, attemper.MultiHeadAttention.from_torch(getattr(ours, name)))
        target, memory = torch.randn(2, 5, 24), torch.randn(2, 8, 24)
        causal = nn.Transformer.generate_square_subsequent_mask(5)
        exact, found = copy.deepcopy(stock).double(), []
        for m in (ours, stock, exact):
            inputs = [t.to(m.linear1.weight.dtype) for t in (target, memory, causal)]
            m(*inputs[:2], tgt_mask=inputs[2], tgt_is_causal=True).square().sum().backward()
            found.append({name: p.grad for name, p in m.named_parameters()})
        largest = max(grad.square().mean().sqrt().item() for grad in found[2].values())
        for name, truth in found[2].items():
            assert_as_exact(name, found[0][name], [found[1][name]], truth, largest)


class TestVitals:
    def test_return_type_is_torchs_unless_signs_are_asked_for(self):
        _, ours = twins(batch_first=True)
        x = torch.randn(2, 5, 24)
        plain = ours(x, x, x, need_weights=False)
        assert type(plain) is tuple
        assert ours.vitals is None
        output, vitals = ours(x, x, x, signs=("entropy",))
        assert torch.equal(output, plain[0])
        assert vitals.measured == ("entropy",)
        with pytest.raises(attemper.errors.SignNotMeasured):
            vitals.peak  # noqa: B018

    def test_signs_of_the_constructor_are_kept_and_can_be_a_loss(self):
        block = attemper.MultiHeadAttention(24, 4, signs=("entropy", "lse"), batch_first=True)
        x = torch.randn(2, 5, 24)
        block(x, x, x, need_weights=False)
        assert block.vitals.measured == ("lse", "entropy")
        block.vitals.entropy.mean().backward()
        assert block.in_proj_weight.grad.abs().sum() > 0
        assert copy.deepcopy(block).vitals is None
        assert set(block.state_dict()) == {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}

    def test_a_row_without_keys_is_zero_not_nan(self):
        _, ours = twins(batch_first=True)
        x = torch.randn(1, 3, 24)
        output, weights = ours(x, x, x, key_padding_mask=torch.ones(1, 3, dtype=torch.bool))
        assert torch.equal(output[0], ours.out_proj.bias.expand(3, 24))
        assert not weights.any()


class TestStateDicts:
    def test_a_torch_dict_loads_where_a_gain_is_learned(self):
        theirs, _ = twins()
        ours = attemper.MultiHeadAttention(24, 4, rule="log_n")
        ours.load_state_dict(theirs.state_dict())
        assert torch.equal(ours.gain, torch.full((4,), 0.43))
        again = attemper.MultiHeadAttention(24, 4, rule="log_n")
        nn.init.constant_(ours.gain, 2.0)
        again.load_state_dict(ours.state_dict())
        assert torch.equal(again.gain, ours.gain)

    def test_what_does_not_fit_is_named(self):
        theirs, ours = twins()
        few = attemper.MultiHeadAttention(24, 4, kv_heads=2)
        with pytest.raises(RuntimeError) as error:
            few.load_state_dict(theirs.state_dict())
        assert "Leave kv_heads, kdim and vdim out to load it." in str(error.value)
        assert all(key in str(error.value) for key in ("q_proj_weight", "in_proj_weight"))
        with pytest.raises(RuntimeError, match="kv_heads=2, kdim=24, vdim=24"):
            ours.load_state_dict(few.state_dict())
        with pytest.raises(RuntimeError, match="size mismatch for in_proj_weight"):
            attemper.MultiHeadAttention(12, 4).load_state_dict(theirs.state_dict())
        with pytest.raises(RuntimeError, match=r'Missing key.*"out_proj\.bias"'):
            ours.load_state_dict({name: t for name, t in theirs.state_dict().items() if name != "out_proj.bias"})


def test_dropout_in_training_only():
    block = attemper.MultiHeadAttention(24, 4, dropout=0.5, batch_first=True)
    x = torch.randn(2, 5, 24)
    assert not torch.equal(block(x)[0], block(x)[0])
    block.eval()
    assert torch.equal(block(x)[0], block(x)[0])
