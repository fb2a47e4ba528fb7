/* Trust regions, clip rules and confidence intervals in float64. Tests compare them with the Python library.
   Bounds are log-ratios. This file does not use the DOM. */
"use strict";

const bandpo = (() => {
  const { abs, exp, expm1, log, log1p, max, min, sqrt } = Math;
  const square = (x) => x * x;

  /** The generator f of each divergence as a function of t = log u, and the radius that is as wide as KL 0.05 at p = 1/2. */
  const divergences = {
    KL: { radius: 0.05, f: (t) => expm1(t) - t },
    ReverseKL: { radius: 0.05, f: (t) => (t === -Infinity ? 1 : exp(t) * t - expm1(t)) },
    TotalVariation: { radius: 0.15, f: (t) => abs(expm1(t)) / 2 },
    PearsonChi2: { radius: 0.1, f: (t) => square(expm1(t)) },
    NeymanChi2: { radius: 0.1, f: (t) => -expm1(t) * expm1(-t) },
    SquaredHellinger: { radius: 0.0125, f: (t) => square(expm1(t / 2)) / 2 },
    JensenShannon: {
      radius: 0.0125,
      f: (t) => ((t === -Infinity ? 0 : exp(t) * t) - (1 + exp(t)) * log1p(expm1(t) / 2)) / 2,
    },
  };

  /** The divergence after a log-ratio t of a token of probability p, if all other tokens are scaled by one factor. */
  const spent = (f, p, t) => p * f(t) + (1 - p) * f(log1p(max(-1, (-p * expm1(t)) / (1 - p))));

  /** The last log-ratio for which `inside` holds, between `near`, where it does, and `far`, where it does not. */
  function edge(inside, near, far) {
    for (;;) {
      const middle = (near + far) / 2;
      if (middle === near || middle === far) return near;
      if (inside(middle)) near = middle;
      else far = middle;
    }
  }

  const band = (divergence, radius, cap = 10) => (p) => {
    const inside = (t) => spent(divergences[divergence].f, p, t) <= radius;
    const most = -log(p);
    const upper = inside(most) ? most : edge(inside, 0, most);
    let far = -1;
    while (inside(far) && far > -1e300) far *= 2;
    const lower = inside(-Infinity) ? -Infinity : edge(inside, 0, far);
    return { lower, upper: min(upper, log(cap)) };
  };
  const fixed = (low, high) => () => ({ lower: log1p(-low), upper: log1p(high) });
  const dcpo = (low, high, cap = 10) => (p) => ({
    lower: log(0.5 + 0.5 * sqrt(max(0, 1 - (4 * low) / p))),
    upper: min(log(0.5 + 0.5 * sqrt(1 + (4 * high) / p)), log(cap)),
  });
  const sides = (lower, upper) => (p) => ({ lower: lower(p).lower, upper: upper(p).upper });

  /** The bound that makes a rule drop the gradient of a token: "upper" or "lower"; "" if it keeps the gradient. */
  function blocked(rule, p, ratio, advantage) {
    const { lower, upper } = rule(p);
    if (advantage > 0 && log(ratio) > upper) return "upper";
    return advantage < 0 && log(ratio) < lower ? "lower" : "";
  }

  const Z = 1.959963984540054; // of 95 %

  /** Wilson's confidence interval of a share of n draws. */
  function wilson(share, n) {
    const [middle, scale] = [share + (Z * Z) / (2 * n), 1 + (Z * Z) / n];
    const half = Z * sqrt((share * (1 - share)) / n + (Z * Z) / (4 * n * n));
    return [max(0, (middle - half) / scale), min(1, (middle + half) / scale)];
  }

  /** The share Σ part / Σ whole over pairs (part, whole), one per step, with an interval for independent steps. */
  function shareOver(pairs) {
    const whole = pairs.reduce((sum, [, n]) => sum + n, 0);
    const share = pairs.reduce((sum, [k]) => sum + k, 0) / whole;
    const k = pairs.length;
    const error = sqrt((pairs.reduce((sum, [part, n]) => sum + square(part - share * n), 0) * k) / (k - 1)) / whole;
    return { share, whole, low: max(0, share - Z * error), high: min(1, share + Z * error) };
  }

  return { divergences, band, fixed, dcpo, sides, blocked, wilson, shareOver };
})();

if (typeof module !== "undefined") module.exports = bandpo;
