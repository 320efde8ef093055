"""Small models to watch, and everything global that a watch touches."""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils import _python_dispatch
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.operation.call_hooks import call_hooks
from attemper.watch.attach import attachment as attach
from attemper.watch.attach.running import running
from close import in_float64


class Block(nn.Module):
    """Self-attention on torch's SDPA."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.packed, self.heads = nn.Linear(width, 3 * width), heads

    def forward(self, x):
        q, k, v = self.packed(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Checkpointed(nn.Sequential):
    """The same layers, each computed again in the backward."""

    def __init__(self, reentrant, as_function, *layers):
        super().__init__(*layers)
        self.reentrant, self.as_function = reentrant, as_function

    def forward(self, x):
        for layer in self:
            x = checkpoint(layer.forward if self.as_function else layer, x, use_reentrant=self.reentrant)
        return x


def stack():
    return nn.Sequential(*(Block() for _ in range(2)))


def state():
    """Everything global that a watch touches."""
    interface, masks = (getattr(transformers, name, None) for name in ("AttentionInterface", "AttentionMaskInterface"))
    return (
        dict(torch_modules._global_forward_hooks),
        dict(torch_modules._global_forward_pre_hooks),
        dict(torch_modules._global_forward_hooks_always_called),
        nn.Module._call_impl,
        torch._C._len_torch_dispatch_stack(),
        _python_dispatch._is_in_torch_dispatch_mode,
        _python_dispatch._is_in_non_infra_torch_dispatch_mode,
        getattr(interface, "get_interface", None),
        F.scaled_dot_product_attention,
        *(
            getattr(owner, name)
            for owner in (torch, torch.special, torch.Tensor)
            for name in ("softmax", "log_softmax")
        ),
        *(torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd),
        *("softmax" in vars(torch.Tensor), torch.Tensor.__new__),
        call_hooks.current,
        dict(getattr(interface, "_global_mapping", {})),
        dict(getattr(masks, "_global_mapping", {})),
        list(running.frames),
        running.current,
        attach.attachment.observers,
        dict(attach.attachment.passes),
        attach.attachment.eager.stance,
        torch._dynamo.eval_frame._stance.stance if "torch._dynamo" in sys.modules else "default",
        list(warnings.filters),
    )


def resident():
    """Bytes of memory that this process holds; 0 where Linux is not there to say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def same(found, expected, close=in_float64):
    """Equal dicts, numbers to the rounding of float64, or to what `close` makes of a number; NaN is NaN."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name] == (close(value) if isinstance(value, float) else value), name


def same_record(first, second):
    """The whole record, to the bit."""
    assert repr(first.to_dicts()) == repr(second.to_dicts())
    assert list(first.info.items()) == list(second.info.items())
    assert first.notes == second.notes


def bits(tensors):
    """Tensors as something that is equal if they are, NaN for NaN."""
    return [None if tensor is None else (tensor.dtype, repr(tensor.tolist())) for tensor in tensors]


def compare(make, drive, kinds, **options):
    """Drive a model under a full watch and an intercepted one; returns how the passes of the second were followed."""
    found = []
    for full in (True, False):
        torch.manual_seed(0)
        model = make()
        kinds.clear()
        with attemper.watch(model, full=full, gradients=True, **options) as watch:
            seen = bits(drive(model, watch))
        found.append((seen, watch))
    (expected, first), (output, second) = found
    assert output == expected
    same_record(second.record, first.record)
    assert second.unmeasured == first.unmeasured
    return list(kinds)


def steps(model, watch, change=lambda model, step: None, count=6):
    """Training passes on the same input, with a change of the model before each."""
    seen, x = [], torch.randn(2, 5, 16)
    for step in range(count):
        change(model, step)
        model.zero_grad()
        output = model(x)
        output.square().mean().backward()
        seen += [output.detach(), *(parameter.grad for parameter in model.parameters())]
        watch.step()
    return seen
