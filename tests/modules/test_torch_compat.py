"""MultiHeadAttention as a citizen of torch: saved, sent, cast, checkpointed, compiled, and inside torch's own models."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import attemper
from close import assert_float64
from judge import assert_as_exact


def block(**options) -> attemper.MultiHeadAttention:
    torch.manual_seed(0)
    return attemper.MultiHeadAttention(24, 4, **{"batch_first": True, "layer": 1, **options})


X = torch.randn(2, 7, 24)


@pytest.mark.parametrize("rule", attemper.RULES)
def test_can_be_pickled_and_copied(rule):
    module = block(rule=rule, signs="entropy")
    module(X)
    again = pickle.loads(pickle.dumps(module))
    assert again.rule is copy.deepcopy(module).rule is module.rule
    assert torch.equal(again(X, need_weights=False)[0], module(X, need_weights=False)[0])


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


class TestStateDicts:
    def test_a_parametrised_gain_round_trips(self):
        module = block(rule="learned")
        parametrize.register_parametrization(module, "gain", Twice())
        module.load_state_dict(module.state_dict())

    def test_not_strict_is_not_an_error(self):
        missing = block().load_state_dict({"q_proj_weight": torch.zeros(24, 24)}, strict=False)
        assert "in_proj_weight" in missing.missing_keys
        theirs = nn.MultiheadAttention(24, 4).state_dict()
        assert block(kv_heads=2, bias=False).load_state_dict(theirs, strict=False).missing_keys

    def test_assigned_on_meta_the_gain_is_real(self):
        with torch.device("meta"):
            module = block(rule="log_n")
        module.load_state_dict(nn.MultiheadAttention(24, 4).state_dict(), assign=True)
        assert torch.equal(module.gain, torch.full((4,), 0.43))
        assert module(X)[0].isfinite().all()

    def test_a_gain_without_a_rule_that_learns_is_named(self):
        with pytest.raises(RuntimeError, match=r"MultiHeadAttention\(\): the state dict has `gain`.*'learned'"):
            block().load_state_dict(block(rule="learned").state_dict())
        model, trained = nn.ModuleDict({"attn": block()}), nn.ModuleDict({"attn": block(rule="learned")})
        with pytest.raises(RuntimeError, match=r'Unexpected key.*"attn\.gain"'):
            model.load_state_dict(trained.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", ["sqrt_dk", "qk_norm", "log_n"])
def test_half_precision_and_autocast(rule, dtype):
    module = block(rule=rule)
    exact = copy.deepcopy(module).double()(X.double(), is_causal=True, signs="all")
    low = copy.deepcopy(module).to(dtype)(X.to(dtype), is_causal=True, signs="all")
    with torch.autocast("cpu", dtype):
        cast = module(X, is_causal=True, signs="all")
    for found in (low, cast):
        assert found.output.dtype == dtype
        assert found.vitals.entropy.dtype == torch.float32
        error = (found.output.double() - exact.output).abs().max()
        assert error < 16 * torch.finfo(dtype).eps * exact.output.abs().max()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant):
    module = block(rule="learned")
    x = X.clone().requires_grad_()
    grads = []
    for run in (lambda t: module(t, need_weights=False)[0], None):
        module.zero_grad()
        first = run or (lambda t: checkpoint(lambda u: module(u, need_weights=False)[0], t, use_reentrant=reentrant))
        first(x).square().sum().backward()
        grads.append([p.grad.clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# a learned gain, the cosine, a softcap, a scale per row that is counted first
@pytest.mark.parametrize("rule", ["qk_norm", "log_n", "softcap"])
def test_compiles_whole(rule):
    module, x = block(rule=rule, kv_heads=2).double(), X.double()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    expected = module(x, is_causal=True, signs="all")
    found = compiled(x, is_causal=True, signs="all")
    assert_float64(found.output, expected.output)
    assert_float64(found.vitals.entropy, expected.vitals.entropy)


def test_grouped_cross_attention_repeats_its_heads():
    few = block(kv_heads=2, kdim=10, vdim=12).double()
    many = block(kdim=10, vdim=12).double()
    state = few.state_dict()
    for name in ("k_proj_weight", "v_proj_weight"):
        state[name] = state[name].unflatten(0, (2, 6)).repeat_interleave(2, 0).flatten(0, 1)
    state["in_proj_bias"] = torch.zeros(72)
    many.load_state_dict(state)
    key, value = torch.randn(2, 9, 10).double(), torch.randn(2, 9, 12).double()
    for need_weights in (False, True):
        assert_float64(
            few(X.double(), key, value, need_weights=need_weights),
            many(X.double(), key, value, need_weights=need_weights),
        )


def test_gradients_of_returned_weights_and_of_an_added_mask():
    theirs, ours = nn.MultiheadAttention(24, 4, batch_first=True), block()
    ours.load_state_dict(theirs.state_dict())
    found = []
    for module in (ours, theirs, copy.deepcopy(theirs).double()):
        dtype = module.in_proj_weight.dtype
        mask, x = torch.ones(7, 7, requires_grad=True, dtype=dtype), X.to(dtype)
        _, weights = module(x, x, x, attn_mask=mask)
        loss = (weights * torch.arange(7.0)).square().sum()
        found.append(torch.autograd.grad(loss, [mask, module.in_proj_weight]))
    for name, a, b, exact in zip(("mask", "in_proj_weight"), *found, strict=True):
        assert_as_exact(name, a, [b], exact)


def test_unbatched_with_masks():
    theirs, ours = nn.MultiheadAttention(24, 4).double(), block(batch_first=False).double()
    ours.load_state_dict(theirs.state_dict())
    hidden, x = torch.arange(7) > 4, X[0].double()
    for mask in (torch.ones(7, 7, dtype=torch.bool).triu(1), torch.ones(4, 7, 7, dtype=torch.bool).triu(1)):
        for need_weights in (False, True):
            options = {"attn_mask": mask, "key_padding_mask": hidden, "need_weights": need_weights}
            assert_float64(ours(x, x, x, **options), theirs(x, x, x, **options))


def test_a_whole_transformer():
    torch.manual_seed(0)
    stock = nn.Transformer(24, 4, 2, 2, 32, dropout=0.0, batch_first=True).double()
    ours = copy.deepcopy(stock)
    for module in list(ours.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.MultiheadAttention):
                setattr(module, name, attemper.MultiHeadAttention.from_torch(child))
    source, target = X.double(), torch.randn(2, 5, 24).double()
    causal = stock.generate_square_subsequent_mask(5)
    for training in (True, False):
        results = [m.train(training)(source, target, tgt_mask=causal, tgt_is_causal=True) for m in (ours, stock)]
        assert_float64(*results)
    assert ours.state_dict().keys() == stock.state_dict().keys()


@pytest.mark.parametrize(
    "options",
    [{"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 6, "vdim": 8}, {"batch_first": True}],
    ids=lambda options: next(iter(options)),
)
def test_from_torch_takes_every_kind(options):
    torch.manual_seed(1)
    theirs = nn.MultiheadAttention(24, 4, dtype=torch.float64, **options)
    ours = attemper.MultiHeadAttention.from_torch(theirs)
    q, k, v = (torch.randn(5, 5, width, dtype=torch.float64) for width in (24, theirs.kdim, theirs.vdim))
    assert_float64(ours(q, k, v), theirs(q, k, v))


def test_what_it_is_can_be_read():
    assert "24, heads=4, rule='log_n', kv_heads=2, layer=1, batch_first=True" in repr(block(rule="log_n", kv_heads=2))
