/* Trust regions, clip rules and intervals in float64, as the library has them; tests hold the two together.
   Bounds are log-ratios. Nothing here touches the page. */
"use strict";

const bandpo = (() => {
  const { abs, exp, expm1, log, log1p, max, min, sqrt } = Math;
  const square = (x) => x * x;

  /** f(u) of t = log u, and the radius that is as wide as KL 0.05 at p = 1/2. */
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

  /** The divergence that a log-ratio t of a token of probability p costs, the others scaled alike. */
  const spent = (f, p, t) => p * f(t) + (1 - p) * f(log1p(max(-1, (-p * expm1(t)) / (1 - p))));

  /** Where `inside` ends between a log-ratio that is inside and one that is not, to the last digit. */
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

  /** The bound at which a rule drops the gradient of a token: "upper", "lower", or "" where it keeps it. */
  function blocked(rule, p, ratio, advantage) {
    const { lower, upper } = rule(p);
    if (advantage > 0 && log(ratio) > upper) return "upper";
    return advantage < 0 && log(ratio) < lower ? "lower" : "";
  }

  const Z = 1.959963984540054; // of 95 %

  /** Wilson's interval of a share, of n draws. */
  function wilson(share, n) {
    const [middle, scale] = [share + (Z * Z) / (2 * n), 1 + (Z * Z) / n];
    const half = Z * sqrt((share * (1 - share)) / n + (Z * Z) / (4 * n * n));
    return [max(0, (middle - half) / scale), min(1, (middle + half) / scale)];
  }

  /** Of pairs (part, whole), one a step: the share, and its interval where steps, not tokens, are drawn anew. */
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
