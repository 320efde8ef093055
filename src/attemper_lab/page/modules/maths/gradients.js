// The gradient of each query: |J dL/dp| at the softmax's input, and |dL/dq|. dL/dp is one unit normal number for each key.

const NOTHING = 1e-10; // share of the largest entry of J dL/dp; smaller entries are lost in float32

/** J g of one row into `into`: p (g − Σ p g). Gives its length. `g` starts at `from`. */
export function throughSoftmax(weights, at, n, g, from, into) {
  let mean = 0,
    square = 0;
  for (let j = 0; j < n; j++) mean += weights[at + j] * g[from + j];
  for (let j = 0; j < n; j++) {
    into[j] = weights[at + j] * (g[from + j] - mean);
    square += into[j] * into[j];
  }
  return Math.sqrt(square);
}

/** Kᵀ u into `into` (d entries): the sum of the keys, each times its own number of `u`. */
export function keysTimes(u, k, { n, d, stride }, into) {
  into.fill(0, 0, d);
  let most = 0;
  for (let j = 0; j < n; j++) most = Math.max(most, Math.abs(u[j]));
  const least = NOTHING * most;
  for (let j = 0; j < n; j += 4) {
    const u0 = u[j],
      u1 = j + 1 < n ? u[j + 1] : 0,
      u2 = j + 2 < n ? u[j + 2] : 0,
      u3 = j + 3 < n ? u[j + 3] : 0;
    if (Math.abs(u0) <= least && Math.abs(u1) <= least && Math.abs(u2) <= least && Math.abs(u3) <= least) continue;
    const b = j * stride,
      c = j + 1 < n ? b + stride : b,
      e = j + 2 < n ? c + stride : b,
      f = j + 3 < n ? e + stride : b;
    for (let x = 0; x < d; x++) into[x] += u0 * k[b + x] + u1 * k[c + x] + u2 * k[e + x] + u3 * k[f + x];
  }
  return into;
}

export function lengthOf(vector, d) {
  let square = 0;
  for (let x = 0; x < d; x++) square += vector[x] * vector[x];
  return Math.sqrt(square);
}

/** dL/dq of a cosine score: the part of Σ u k/|k| that is perpendicular to q, over |q|. `u` becomes u/|k|. */
export function acrossQuery(u, k, kLengths, q, a, qLength, shape, into) {
  for (let j = 0; j < shape.n; j++) u[j] = kLengths[j] ? u[j] / kLengths[j] : 0;
  keysTimes(u, k, shape, into);
  if (!qLength) return 0;
  let along = 0;
  for (let x = 0; x < shape.d; x++) along += into[x] * q[a + x];
  for (let x = 0; x < shape.d; x++) into[x] = (into[x] - (along * q[a + x]) / (qLength * qLength)) / qLength;
  return lengthOf(into, shape.d);
}

/** dL/dq of an additive score: entry x is w_x Σ u (1 − tanh²(q + k)). */
export function throughTanh(u, tq, tk, weight, i, { n, d }, into) {
  into.fill(0, 0, d);
  for (let j = 0; j < n; j++) {
    if (!u[j]) continue;
    for (let x = 0, a = i * d, b = j * d; x < d; x++, a++, b++) {
      const t = (tq[a] + tk[b]) / (1 + tq[a] * tk[b]);
      into[x] += u[j] * weight[x] * (1 - t * t);
    }
  }
  return lengthOf(into, d);
}
