"""what a call has that no kernel knows: documents in one sequence, a sink, jagged tensors.

compute.py    what computes a problem: a kernel, with the next two where the call has any
documents.py  attention within each document, by any kernel, on slices of its tensors; and the checks of offsets
sink.py       a learned logit beside the keys of each row, added to what any kernel returned; and its checks
jagged.py     SDPA on torch's jagged tensors: one call, with their offsets as documents
"""
