"""The operation: from the caller's tensors to a kernel, and back with output, signs and derivatives.

plain.py     decides whether a call is plain: ordinary tensors, nothing that traces or transforms; direct.py runs those
listen.py    the watch that is told of each call of this thread, and the tally that each call is added to
direct.py    a plain call to the native kernel, without an op
checks.py    every other call: each argument checked, with its error; the result is one 4-d Problem
biases.py    masks whose class answers for torch: CausalBias is a band, another is refused
shapes.py    the part of these checks that is about tensors: types, dtypes, devices, shapes; how they broadcast
ops.py       every other call: torch.library ops with fakes, autograd, vmap, and errors for derivatives they lack
padding.py   which queries are padding, for a tally and for a watch
tally.py     the op that adds the vitals of a call, by head, to a tensor of its module: for compiled models
measured.py  a call that is added to a tally; in a compiled graph its signs are one tensor, which two ops share
"""
