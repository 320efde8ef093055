"""Experiments on details of common explanations; nothing is trained, and each file has `measure`, `expect`, `finding` and `draw`.

In the order in which to read them:

    width.py          with 1/√d_k, do the logits depend on the width of the embeddings?
    similarity.py     does the largest dot product belong to the most similar key?
    ranges.py         how much wider is the range of scores in 5 dimensions than in 2?
    head_dims.py      which head dims d_k do models have?
    three_scores.py   how do additive, bare and scaled dot-product scores compare as d grows, and what do they compute?
    plateau.py        do small gradients make learning unstable, or slow?
    scale_cost.py     does the scale change the time that attention takes?
"""
