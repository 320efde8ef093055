"""What replace=True leaves behind: a name that still computes, and nothing of the watch."""

import copy
import gc
import weakref

import attemper
import zoo
from judge import assert_as_exact


def test_a_copy_made_while_replaced_still_runs():
    subject = zoo.make("llama")
    before = subject.run()
    with attemper.watch(subject.model, replace=True) as watch:
        subject.run()
        copied = copy.deepcopy(subject.model)
    rows = len(watch.record)
    assert subject.model.config._attn_implementation != "attemper"
    assert_as_exact("output", copied(**subject.inputs)[0], [before], zoo.in_float64(subject).run())
    assert len(watch.record) == rows
    gone = weakref.ref(watch)
    del watch
    gc.collect()
    assert gone() is None  # what stays registered holds nothing of it
