// The ways to compare queries with keys: dot product, cosine, additive. Vectors are rows that `stride` numbers apart.

/** q·k of every query with every key, into a Float32Array (m × n); sums are in double precision. */
export function dotScores(q, k, { m, n, d, stride }, into = new Float32Array(m * n)) {
  for (let i = 0; i < m; i++) {
    const a = i * stride,
      row = i * n;
    let j = 0;
    for (; j + 3 < n; j += 4) {
      const b = j * stride,
        c = b + stride,
        e = c + stride,
        f = e + stride;
      let s0 = 0,
        s1 = 0,
        s2 = 0,
        s3 = 0;
      for (let x = 0; x < d; x++) {
        const one = q[a + x];
        s0 += one * k[b + x];
        s1 += one * k[c + x];
        s2 += one * k[e + x];
        s3 += one * k[f + x];
      }
      into[row + j] = s0;
      into[row + j + 1] = s1;
      into[row + j + 2] = s2;
      into[row + j + 3] = s3;
    }
    for (; j < n; j++) {
      let sum = 0;
      for (let x = 0; x < d; x++) sum += q[a + x] * k[j * stride + x];
      into[row + j] = sum;
    }
  }
  return into;
}

/** The length of each of `rows` vectors. */
export function lengthsOf(vectors, rows, { d, stride }) {
  return Float64Array.from({ length: rows }, (_, i) => {
    let sum = 0;
    for (let x = i * stride; x < i * stride + d; x++) sum += vectors[x] * vectors[x];
    return Math.sqrt(sum);
  });
}

/** cos(q, k) from the dot products and the lengths; a vector of zeros has no direction and scores 0. */
export function cosineScores(raw, qLengths, kLengths, { m, n }) {
  const into = new Float32Array(m * n);
  for (let i = 0; i < m; i++) {
    for (let j = 0; j < n; j++) {
      const product = qLengths[i] * kLengths[j];
      into[i * n + j] = product ? raw[i * n + j] / product : 0;
    }
  }
  return into;
}

/** tanh of every entry, in double precision: tanh(a + b) = (tanh a + tanh b) / (1 + tanh a tanh b) needs no further tanh. */
export function tanhOf(vectors, rows, { d, stride }) {
  const found = new Float64Array(rows * d);
  for (let i = 0; i < rows; i++) for (let x = 0; x < d; x++) found[i * d + x] = Math.tanh(vectors[i * stride + x]);
  return found;
}

/** Σ w tanh(q + k) of every query with every key, from the tanh of each. */
export function additiveScores(tq, tk, weight, { m, n, d }) {
  const into = new Float32Array(m * n);
  for (let i = 0; i < m; i++) {
    for (let j = 0; j < n; j++) {
      let sum = 0;
      for (let x = 0, a = i * d, b = j * d; x < d; x++, a++, b++) sum += (weight[x] * (tq[a] + tk[b])) / (1 + tq[a] * tk[b]);
      into[i * n + j] = sum;
    }
  }
  return into;
}
