// The bench as Python: code that draws the same vectors, and prints the same signs and gradients with the library.

const CALL = {
  additive: 'attemper.additive_attention(q, k, unit, normal("weight", 1, d, seed)[0] / d**0.5, mask=bias)',
  qk_norm: "attemper.cosine_attention(q, k, unit, scale=d**0.5, mask=bias)",
  softcap: "attemper.attention(q, k, unit, scale=d**-0.5, softcap=50.0, mask=bias)",
  none: "attemper.attention(q, k, unit, scale=1.0, mask=bias)",
  after: "attemper.attention(q, k, unit, scale=1.0, mask=bias)",
};
const byRule = (name) =>
  CALL[name] ?? `attemper.attention(q, k, unit, scale=attemper.rule("${name}").scale(head_dim=d, heads=heads), mask=bias)`;
const HALF = `scores = q @ k.T
    rounded = scores + (scores.half().float() - scores).detach()
    attended = attemper.attention(torch.ones(len(q), 1, 1), rounded[..., None], unit.expand(len(q), n, n), scale=1.0, mask=bias[:, None])
    weights, vitals = attended.output[:, 0], attended.vitals.each(lambda sign: sign[:, 0])`;

/** One function for each lane. */
function laneCode(name) {
  const body = name === "fp16" ? HALF : `weights, vitals = ${byRule(name)}`;
  const behind = name === "after" ? "\n    weights = weights / d**0.5      # too late" : "";
  return `def ${name}(q, bias):\n    ${body}${behind}\n    return weights, vitals\n`;
}

export function benchPython(state, lanes, alignment) {
  const { d, n, heads, seed } = state,
    queries = Math.max(...lanes.map(({ rows }) => rows.length)),
    names = lanes.map(({ name }) => name);
  const few = lanes.find(({ rows }) => rows.length < queries); // a lane that takes longer has fewer queries
  const count = few ? `${few.rows.length} if rule is ${few.name} else queries      # fewer where each takes longer` : "queries";
  const own = state.aligned
    ? `own = min(queries, n)                # each query's own key is partly the query
k[:own] = ${alignment} * q[:own] + (1 - ${alignment}**2) ** 0.5 * k[:own]\n`
    : "";
  return `import torch

import attemper
from attemper_lab.page import normal      # the page's own random numbers

d, n, queries, heads, seed = ${d}, ${n}, ${queries}, ${heads}, ${seed}
q, k = normal("query", queries, d, seed), normal("key", n, d, seed)
upstream = normal("gradient", queries, n, seed)      # dL/d(weights)
unit = torch.eye(n)                  # with these values the output is the weights
${own}

${names.map(laneCode).join("\n\n")}

for rule in (${names.join(", ")}):
    count = ${count}
    query = q[:count].clone().requires_grad_()
    bias = torch.zeros(count, n, requires_grad=True)      # its gradient is that at the softmax's input
    weights, vitals = rule(query, bias)
    at_q, at_logits = torch.autograd.grad(weights, (query, bias), upstream[:count])
    print(rule.__name__)
    print("  spread        ", vitals.variance.mean().sqrt().item())
    print("  top weight    ", weights.amax(-1).mean().item())
    print("  effective keys", vitals.effective_keys.mean().item())
    print("  entropy       ", vitals.entropy.mean().item())
    for name, gradient in (("softmax's input", at_logits), ("q", at_q)):
        lengths = gradient.norm(dim=-1)
        print(f"  gradient at {name}: median", lengths.quantile(0.5).item(), "RMS", lengths.square().mean().sqrt().item())
`;
}
