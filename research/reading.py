"""What docs/notes.md has beside the sentences: symbols, takeaways, Hinglish, credits. It has no numbers."""

from __future__ import annotations

SYMBOLS = (
    ("n", "number of tokens: queries, and keys", "`n`, `Lq`, `Lk`"),
    ("d, d_model", "width of the model: size of an embedding", "`d_model`"),
    ("h", "number of heads", "`heads`, `H`"),
    ("d_k", "size of a query and of a key in one head; often d_model / h", "`E`, `head_dim`"),
    ("d_v", "size of a value; usually d_k", "`Ev`"),
    ("X", "embeddings, n × d_model", ""),
    ("W_Q, W_K, W_V", "learned projections, d_model × d_k for each head", "`MultiHeadAttention`"),
    ("Q, K, V", "queries, keys, values: X W_Q, X W_K, X W_V; n × d_k", "`query`, `key`, `value`"),
    ("S", "scores QKᵀ, n × n", ""),
    ("z", "logit: the score after the scale, before softmax", "`peak`, `variance`, `mean`"),
    ("p", "weight: softmax of a row of logits", "`weights()`, `top_weight`"),
    ("J", "Jacobian of softmax: diag(p) − p pᵀ", "`jacobian_trace`"),
    ("W_O", "projection of the concatenated heads, d_model × d_model", ""),
    ("w (their v)", "weight vector of an additive score, d numbers", "`additive_attention(…, weight)`"),
)
"""A symbol, what it means, and the name it has in attemper."""

TAKEAWAYS = (
    ("q·k grows with d_k", "its std grows as √d_k if entries are independent with variance 1", ("C1", "C3")),
    (
        "Large scores make softmax one-hot",
        "one key has half the weight from a spread of about √(2 ln n) on, 0.9 of it from six times that",
        ("C5", "C14"),
    ),
    (
        "Gradients vanish, or explode",
        "the median becomes small while a model trains, the RMS does not explode; neither says why the loss is higher",
        ("C6", "C7", "C34"),
    ),
    (
        "Few weights are updated",
        "few queries send the gradient, but it reaches nearly every entry of W_Q and W_K",
        ("C22",),
    ),
    (
        "√d_k normalises the variance",
        "to 1 before training; d_k or √d_model make it smaller",
        ("C2", "C10", "C11", "C26", "C30"),
    ),
    (
        "Training is stable with it",
        "without it training is slower or ends higher, by task, initialisation and rate",
        ("C9", "C15", "C20"),
    ),
    (
        "Additive attention needs no scale",
        "its bound is Σ|w|, not 1, and it is slower because of its tanh's",
        ("C12", "C13", "C33", "C35"),
    ),
    (
        "'it' attends to what it refers to",
        "barely above chance where meaning decides; more heads where gender decides",
        ("C24",),
    ),
)
"""What one takes away from the notes, what was found, and the claims that say so."""

HINGLISH = """\
**Attention mein √d_k se divide kyun karte hain?**

Har token ka ek query vector q hota hai aur ek key vector k. Dono mein d_k numbers hote hain. Score unka dot product hai:
q·k = q₁k₁ + q₂k₂ + … Yeh d_k terms ka sum hai.

1. **Sum failta hai.** Agar har entry independent hai, mean 0 aur variance 1, to har term ka variance bhi 1 hota hai.
   Independent terms ke variance jud jaate hain: Var(q·k) = d_k, yaani std = √d_k. d_k = 64 par 8, aur d_k = 512 par 22.6.
2. **Softmax ko differences dikhte hain.** [7, 3] se [0.98, 0.02] banta hai. Jab scores ka spread √(2 ln n) se bada ho jaata
   hai (n = kitni keys hain), to weight kuch hi keys par simatne lagta hai.
3. **Phir gradient kam queries se aata hai, aur har step logits ko √d_k guna door le jaata hai.** Seekhna dheema hota hai;
   *dheema* aur *unstable* ek hi baat nahin. Dono mein se kaun sa kaaran kitna hai, yeh language model mein abhi naapa nahin gaya.
4. **Ilaaj ek hi number hai.** √d_k se divide karo, variance d_k/d_k = 1 ho jaata hai, d_k kuch bhi ho. d_k se divide karoge
   to shuruaat mein attention lagbhag barabar bant jaayega. d_model nahin, d_k: dot product har head ke andar hota hai.

Khud dekho:

```python
import torch
import attemper

torch.manual_seed(0)
query, key, value = torch.randn(3, 1, 256, 64)  # 256 tokens, d_k = 64
for naam, scale in (("bina scale", 1.0), ("1/√d_k", 64**-0.5)):
    vitals = attemper.attention(query, key, value, scale=scale).vitals
    print(f"{naam:10}  variance {vitals.variance.mean():5.2f}  effective keys {vitals.effective_keys.mean():6.2f} / 256")
```

```text
```
"""

CREDITS = (
    ("001", "nobody; two pictures that it shows were not kept with it, so they are not judged here."),
    (
        "002",
        "Vaswani et al. 2017, *Attention Is All You Need*, [arXiv 1706.03762](https://arxiv.org/abs/1706.03762); "
        "Jay Alammar, *The "
        "Illustrated Transformer*, [jalammar.github.io](https://jalammar.github.io/illustrated-transformer/); "
        "Islam et al. 2023, *A "
        "Comprehensive Survey on Applications of Transformers for Deep Learning Tasks*, [arXiv 2306.07303](https://arxiv.org/abs/2306.07303).",
    ),
    (
        "003",
        "the video *Why divide by √d_k in Scaled Dot-Product Attention* by *Learn With Jay*, which it sums up; no link is given.",
    ),
    (
        "004",
        "Bahdanau attention by name: Bahdanau, Cho and Bengio 2015, *Neural Machine Translation by Jointly Learning to Align and "
        "Translate*, [arXiv 1409.0473](https://arxiv.org/abs/1409.0473).",
    ),
)
"""Whom each note credits."""
