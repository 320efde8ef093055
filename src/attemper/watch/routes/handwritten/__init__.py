"""handwritten: attention that a model computes as product, softmax, product.

Data passes the files in this order:

    op_names    which ops are followed
    chain       follows matrices from op to op, and makes a call at the softmax
    matrices    what is known of a matrix of scores or of weights after each op
    layout      which dimensions of the logits are batch, heads, queries and keys
    slices      which heads a call computes, if a module computes some at a time
"""
