"""The operation: from the caller's tensors to a kernel, and back with output, signs and derivatives.

plain.py    is this a plain call (CPU tensors, nothing that traces or transforms)? Then straight to direct.py
listen.py   does a watch of this thread listen, or has the module a tally? Then it gets each call
direct.py   a plain call to the native kernel, without an op
checks.py   every other call: each argument checked, with its error; the result is one 4-d Problem
ops.py      every other call: torch.library ops with fakes, autograd, vmap and errors for what they do not do
padding.py  which queries are padding, for a tally and for a watch
tally.py    the op that adds the vitals of a call, by head, to a tensor of its module: for compiled models
"""
