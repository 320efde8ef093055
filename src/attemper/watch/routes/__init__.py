"""routes: how an attention call is recognised, and read as one AttentionCall.

Data passes the files in this order; each call takes one of the first six routes:

    sdpa            torch's fused ops, and the fast paths of nn.MultiheadAttention and the encoder layer
    ragged          torch.nn.attention.varlen, and SDPA on jagged tensors
    attemper        attemper's own op
    transformers    the Hugging Face attention interface
    versions        where the versions of transformers differ in that
    replace         the same interface, computed by attemper's kernels
    handwritten/    a product, a softmax and a product, written by hand
    packed          the documents of a packed call
    kind            whether a call is self- or cross-attention
    exchanged       which attention modules exchange tensors with other ranks
"""
