// The comparison as Python: the same vectors, and the four scores by the library.

export function scoresPython({ d, seed }, queries, keys) {
  return `import attemper
from attemper_lab.page import normal      # the page's own random numbers

d, queries, keys, seed = ${d}, ${queries}, ${keys}, ${seed}
q, k = normal("query", queries, d, seed), normal("key", keys, d, seed)
w = normal("weight", 1, d, seed)[0] / d**0.5

scores = {
    "dot product": attemper.measure(q, k, scale=1.0),
    "scaled dot product": attemper.measure(q, k),
    "cosine": attemper.cosine_attention(q, k, k, scale=1.0).vitals,
    "additive": attemper.additive_attention(q, k, k, w).vitals,
}
for name, vitals in scores.items():
    print(name)
    print("  spread        ", vitals.variance.mean().sqrt().item())
    print("  largest       ", vitals.peak.max().item())
    print("  top weight    ", vitals.top_weight.mean().item())
    print("  effective keys", vitals.effective_keys.mean().item())
`;
}
