"""What replace=True leaves behind: a name that still computes, and nothing of the watch."""

import copy
import gc
import weakref

import torch

import attemper
import zoo


def test_a_copy_made_while_replaced_still_runs():
    subject = zoo.make("llama")
    before = subject.run()
    with attemper.watch(subject.model, replace=True) as watch:
        subject.run()
        copied = copy.deepcopy(subject.model)
    rows = len(watch.record)
    assert subject.model.config._attn_implementation != "attemper"
    torch.testing.assert_close(copied(**subject.inputs)[0], before, rtol=1e-4, atol=1e-5)
    assert len(watch.record) == rows
    gone = weakref.ref(watch)
    del watch
    gc.collect()
    assert gone() is None  # what stays registered holds nothing of it
