"""The operation: from the caller's tensors to a kernel, and back with output, signs and derivatives.

run.py         every call, from its arguments to its kernel and back
call.py        each argument checked, with its error: a Call, whose problem is 4-d
biases.py      masks whose class answers for torch: CausalBias is a band, another is refused
shapes.py      the part of these checks that is about tensors: types, dtypes, devices, shapes; how they broadcast

autograd.py    the three autograd Functions: around a kernel, around an op, and the first derivative
parts/         what a call has that no kernel knows: documents, a sink, jagged tensors
ops.py         the torch.library ops with their fakes, for a call that torch has to see
vmap.py        the vmap rules of the ops
call_hooks.py  the watch that is told of each call of this thread, and the tally that each call is added to
tally.py       the ops that add the vitals of a call, by head, to a tensor of its module: for compiled models
padding.py     which queries are padding, for a tally and for a watch
"""
