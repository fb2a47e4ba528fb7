"""Policy losses of the literature, each written from its paper's formula: the oracle for objectives and methods.

Nothing here imports bandpo, and nothing is fast. Each function takes log-probabilities ``(batch, time)``, advantages
``(batch, time)`` or ``(batch, 1)``, and a mask, and returns the loss of each token, to be differentiated by autograd.
The mask is used where a method looks at the whole sequence; the caller masks and aggregates the result. A method of
sequences returns its loss once per token, so that a mean over tokens and then over sequences is the paper's.
`packages/bandpo/tests/core/test_method_references.py` holds them to the frameworks that ship them.
"""

import math
from typing import NamedTuple

import torch

# --- pieces -----------------------------------------------------------------------------------------------------------


def mean_of_sequence(values, mask):
    return (values * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def surrogate(ratio, lower, upper, advantages, dual=math.inf):
    """PPO's minimum; for negative advantages no worse than ``dual·A`` (dual clip, 1912.09729)."""
    clipped = torch.minimum(torch.maximum(ratio, torch.as_tensor(lower)), torch.as_tensor(upper))
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if dual < math.inf:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual * advantages), objective)
    return -objective


def binary_kl(p, q):
    """KL of two-outcome distributions, from p to q."""
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


# --- the ratio clipped ------------------------------------------------------------------------------------------------


def ppo(logp, logp_old, advantages, mask, *, low=0.2, high=0.2, dual=math.inf):
    """PPO 1707.06347, GRPO, Clip-Higher 2503.14476 (high=0.28), dual clip 1912.09729 (dual=3)."""
    return surrogate((logp - logp_old).exp(), 1 - low, 1 + high, advantages, dual)


def gspo(logp, logp_old, advantages, mask, *, low=3e-4, high=4e-4):
    """GSPO 2507.18071: PPO of the sequence's length-normalised ratio."""
    ratio = mean_of_sequence(logp - logp_old, mask).exp().expand_as(logp)
    return surrogate(ratio, 1 - low, 1 + high, advantages)


def gmpo(logp, logp_old, advantages, mask, *, low=0.4, high=0.4):
    """GMPO 2507.20673: the geometric mean of ratios that are first clipped token by token, in log space."""
    log_ratio = logp - logp_old
    upper, lower = log_ratio.clamp(max=high), log_ratio.clamp(min=-low)
    one_sided = torch.where(advantages > 0, upper, torch.where(advantages < 0, lower, log_ratio))
    return -mean_of_sequence(one_sided, mask).exp() * advantages.expand_as(logp)


def dcpo(logp, logp_old, advantages, mask, *, low=0.16, high=0.2, max_ratio=10.0, dual=math.inf):
    """DCPO 2509.02333: bounds from ``(r−1)·r·p ≤ ε`` above and ``(1−r)·r·p ≤ ε`` below."""
    p = logp_old.exp()
    lower = (1 + (1 - 4 * low / p).clamp(min=0).sqrt()) / 2
    upper = ((1 + (1 + 4 * high / p).sqrt()) / 2).clamp(max=max_ratio)
    return surrogate((logp - logp_old).exp(), lower, upper, advantages, dual)


def trgppo(logp, logp_old, advantages, mask, *, delta=0.05):
    """TRGPPO 1901.10314, its adaptive interval alone: the ratios with binary KL(old‖new) of at most delta."""
    ratio, p = (logp - logp_old).exp(), logp_old.exp()
    outside = binary_kl(p, logp.exp()) > delta
    outward = torch.where(advantages > 0, ratio > 1, ratio < 1)
    # The ratio at the edge of the interval, on the side of the token's own: 100 bisections.
    inside = torch.ones_like(ratio.detach())
    beyond = torch.where(ratio > 1, 1 / p, torch.zeros_like(p))
    for _ in range(100):
        middle = (inside + beyond) / 2
        is_inside = binary_kl(p, p * middle) <= delta
        inside, beyond = torch.where(is_inside, middle, inside), torch.where(is_inside, beyond, middle)
    return -torch.where(outside & outward, inside, ratio) * advantages


BAPO = {"share": 0.5, "lower": (0.6, 0.9), "upper": (1.2, 3.0), "steps": (0.05, 0.05), "upper_first": False}


def bapo_bounds(logp, logp_old, advantages, mask, *, share, lower, upper, steps, upper_first):
    """BAPO 2510.18927: move the bounds until positive advantages carry that share of the clipped objective.

    ``lower`` and ``upper`` are (start, end) as ratios, ``steps`` their two steps. The authors' code moves the lower
    bound to its end first; the paper's algorithm is reported to move the upper one first.
    """
    ratio = (logp - logp_old).exp().detach()
    bounds = {"lower": lower[0], "upper": upper[0]}
    ends, step = {"lower": lower[1], "upper": upper[1]}, dict(zip(("lower", "upper"), steps, strict=True))

    def reached():
        gained, lost = advantages.clamp(min=0) * mask, advantages.clamp(max=0) * mask
        positive = (ratio.clamp(max=bounds["upper"]) * gained).sum()
        negative = -(ratio.clamp(min=bounds["lower"]) * lost).sum()
        return negative == 0 or positive >= share * (positive + negative)

    for side in ("upper", "lower") if upper_first else ("lower", "upper"):
        while not reached() and bounds[side] < ends[side]:
            bounds[side] = min(bounds[side] + step[side], ends[side])
    return bounds["lower"], bounds["upper"]


def bapo(logp, logp_old, advantages, mask, *, dual=math.inf, **settings):
    """BAPO 2510.18927: PPO between the bounds of `bapo_bounds`, found anew for each batch."""
    found = bapo_bounds(logp, logp_old, advantages, mask, **BAPO | settings)
    return surrogate((logp - logp_old).exp(), *found, advantages, dual)


def m2po(logp, logp_old, advantages, mask, *, threshold=0.04):
    """M2PO 2510.01161, Algorithm 1: the token with the largest (log r)² goes until the mean of the rest is small.

    Of the tokens that move the way A pushes. What goes has no loss.
    """
    moved, a = (logp - logp_old).detach(), advantages.expand_as(logp)
    squares = moved.square()
    outward = (mask == 1) & (a * moved > 0)
    kept = torch.ones_like(squares, dtype=torch.bool)
    while outward.any() and squares[outward].mean() > threshold:
        largest = squares.masked_fill(~outward, -1.0).argmax()
        outward.view(-1)[largest] = False
        kept.view(-1)[largest] = False
    return -(logp - logp_old).exp() * kept * advantages


def clip_cov(logp, logp_old, advantages, mask, *, low=1.0, high=1.0, minimum=1.0, maximum=5.0):
    """Clip-Cov 2505.22617, where all tokens are drawn that can be: PPO without those between two covariances.

    Tokens that PPO's clip blocks cannot be drawn, as in the authors' code.
    """
    counted, a = mask == 1, advantages.expand_as(logp)
    x = logp.detach()
    covariance = (a - a[counted].mean()) * (x - x[counted].mean())
    clipped = ppo(logp, logp_old, advantages, mask, low=low, high=high)
    blocked = clipped > -(logp - logp_old).exp() * advantages
    drawn = counted & (covariance > minimum) & (covariance < maximum) & ~blocked
    return clipped * ~drawn


def trm(logp, logp_old, advantages, mask, *, limit=0.01):
    """Trust Region Masking 2512.23075, by the mean of k3: the unclipped surrogate of sequences that stayed near."""
    ratio = (logp - logp_old).exp()
    drift = mean_of_sequence(ratio - 1 - (logp - logp_old), mask).detach()
    return -ratio * advantages * (drift <= limit)


def pspo(logp, logp_old, advantages, mask, *, alpha=0.1):
    """PSPO 2509.21282: the ratio of the mixture with the old policy, unclipped."""
    return -((1 - alpha) * (logp - logp_old).exp() + alpha) * advantages


def prime_rl(logp, logp_old, advantages, mask, *, radius=0.2, coefficient=1e-3):
    """prime-rl's default loss: the ratio where π moved by at most radius the way A pushes; Kimi-K2.5's ℓ² besides."""
    moved = (logp.exp() - logp_old.exp()).detach()
    kept = torch.where(advantages > 0, moved <= radius, moved >= -radius)
    return coefficient * (logp - logp_old) ** 2 - kept * (logp - logp_old).exp() * advantages


def kl_cov(logp, logp_old, advantages, mask, *, share=0.002, coefficient=1.0):
    """KL-Cov 2505.22617: the ratio unclipped, and |ℓ| on the share of tokens where A and log π vary together most."""
    counted = mask == 1
    a, x = advantages.expand_as(logp)[counted], logp.detach()[counted]
    covariance = ((a - a.mean()) * (x - x.mean())).tolist()
    most = sorted(range(len(covariance)), key=lambda i: -covariance[i])[
        : max(1, int(share * len(covariance)))
    ]
    chosen = torch.zeros_like(x)
    chosen[most] = coefficient
    penalty = torch.zeros_like(logp.detach()).masked_scatter(counted, chosen) * (logp - logp_old).abs()
    return penalty - (logp - logp_old).exp() * advantages


def dgpo(logp, logp_old, advantages, mask, *, low=0.2, high=0.2, n=1, m=2):
    """DGPO 2603.14389: gradients of π with the weight C·π^n below and C·π^(−1/m) above; C makes it continuous."""
    pi, ratio, old = logp.exp(), (logp - logp_old).exp().detach(), logp_old.exp()
    below, above = (1 - low) * old, (1 + high) * old
    weight = 1 / old
    falling = weight * (pi.detach() / below) ** n
    rising = weight * (pi.detach() / above) ** (-1 / m)
    weight = torch.where((advantages < 0) & (ratio < 1 - low), falling, weight)
    weight = torch.where((advantages > 0) & (ratio > 1 + high), rising, weight)
    return -advantages * weight * pi


def maspo(logp, logp_old, advantages, mask, *, sigma=1.0, alpha=0.3, beta=0.03):
    """MASPO 2602.17550: a Gaussian gate with the width that its authors' code gives, limits of the code included."""
    ratio, q = (logp - logp_old).exp(), logp_old.exp()
    base = (sigma * q**-alpha).clamp(sigma, 10)
    up = base * (1 + beta * advantages).clamp(0.1, 10)
    down = base * (1 / (1 - beta * advantages)).clamp(0.1, 10)
    width = torch.where(advantages > 0, up, down)
    gate = torch.exp(-((ratio - 1) ** 2) / (2 * width**2)).detach()
    pushed = ((advantages > 0) & (ratio > 1)) | ((advantages < 0) & (ratio < 1))
    return -torch.where(pushed, gate, 1.0) * ratio * advantages


def mhpo(logp, logp_old, advantages, mask, *, c=1.5, k_up=1.5, scale_up=1.0, k_down=2.0, scale_down=0.8):
    """MHPO 2603.16929: exp(ψ − ζ)·A with ψ = c·tanh(log r/c) and the hazard ζ not differentiated."""
    psi = c * torch.tanh((logp - logp_old) / c)
    still = psi.detach()
    hazard = (torch.log1p(still.exp()) / scale_up) ** k_up + (
        torch.log1p((-still).exp()) / scale_down
    ) ** k_down
    return -torch.exp(psi - hazard) * advantages


def fipo(logp, logp_old, advantages, mask, *, decay=32.0, boost=0.2, low=0.2, high=0.28, dual=10.0):
    """FIPO 2603.19835: PPO, A multiplied by e^(discounted log-ratios of the token and what follows), in [1, 1.2]."""
    moved = ((logp - logp_old) * mask).detach()
    moved = moved * (moved.exp() <= dual)
    place = torch.arange(logp.shape[-1])
    distance = (place[None] - place[:, None]).double()  # to the token of the column from that of the row
    discount = torch.where(distance >= 0, 0.5 ** (distance / decay), 0.0)
    factor = (moved.double() @ discount.T).exp().clamp(1.0, 1 + boost)
    return factor * ppo(logp, logp_old, advantages, mask, low=low, high=high, dual=dual)


# --- the ratio as a constant weight -----------------------------------------------------------------------------------


def cispo(logp, logp_old, advantages, mask, *, low=1.0, high=4.0):
    """CISPO 2506.13585: the clipped ratio, without gradient, weighs ``A·logp``."""
    weight = (logp - logp_old).exp().clamp(1 - low, 1 + high).detach()
    return -weight * advantages * logp


def dppo_tv(logp, logp_old, advantages, mask, *, low=0.15, high=0.15, max_weight=20.0):
    """DPPO 2602.04879, binary TV: tokens whose probability moved too far, the way A pushes, are dropped."""
    moved = (logp.exp() - logp_old.exp()).detach()
    kept = torch.where(advantages > 0, moved <= high, moved >= -low)
    return -(logp - logp_old).exp().clamp(max=max_weight).detach() * kept * advantages * logp


def cppo(logp, logp_old, advantages, mask, *, radius=0.15, budget=0.02, last=0.8):
    """CPPO 2606.10968, eq. 8 to 11 and 22, with total variation: a sequence at a time, a token at a time."""
    moved, ratio = (logp.exp() - logp_old.exp()).abs().detach(), (logp - logp_old).exp()
    kept = torch.ones_like(moved, dtype=torch.bool)
    for row, counts in enumerate(mask == 1):
        places = counts.nonzero().flatten().tolist()
        if not places:
            continue
        allowance = min(max(moved[row, counts].quantile(0.9).item(), budget), 2 * budget)
        weights, spent = 0.0, 0.0
        for step, place in enumerate(places):
            weight = 1 - (1 - last) * step / max(len(places) - 1, 1)
            used = weight * moved[row, place].item()
            kept[row, place] = used <= min(radius, radius + allowance * weights - spent)
            weights, spent = weights + weight, spent + used
    kept = kept | (advantages * (ratio.detach() - 1) <= 0)
    return -ratio * kept * advantages


def dppo_kl(logp, logp_old, advantages, mask, *, low=0.05, high=0.05, max_weight=20.0):
    """DPPO 2602.04879, binary KL(old‖new) in place of the distance."""
    p, q = logp_old.exp(), logp.exp().detach()
    kl = binary_kl(p, q)
    kept = torch.where(advantages > 0, (kl <= high) | (q <= p), (kl <= low) | (q >= p))
    return -(logp - logp_old).exp().clamp(max=max_weight).detach() * kept * advantages * logp


def icepop(logp, logp_old, advantages, mask, *, lower=0.5, upper=5.0):
    """IcePop 2510.18855 on the ratio to the rollout engine (2512.16144, eq. 1): dropped outside, whatever the sign."""
    ratio = (logp - logp_old).exp()
    kept = (ratio >= lower) & (ratio <= upper)
    return -ratio * kept * advantages


def ipo(logp, logp_old, advantages, mask, *, radius=0.1, coefficient=1e-3):
    """prime-rl's "ipo": dropped where the probability moved by more than radius either way; ℓ² on every token."""
    kept = (logp.exp() - logp_old.exp()).abs() <= radius
    return coefficient * (logp - logp_old) ** 2 - (logp - logp_old).exp() * kept * advantages


def minirl(logp, logp_old, advantages, mask, *, logp_rollout=None, low=0.2, high=0.27, max_weight=5.0):
    """MiniRL 2512.01374, eq. 7: the mask of π/π_old, and the weight π/μ, of the rollout engine's μ, up to a limit."""
    ratio = (logp - logp_old).exp().detach()
    dropped = (advantages > 0) & (ratio > 1 + high) | (advantages < 0) & (ratio < 1 - low)
    rollout = logp_old if logp_rollout is None else logp_rollout
    weight = (logp - rollout).exp().clamp(max=max_weight).detach()
    return -weight * ~dropped * advantages * logp


def vespo(logp, logp_old, advantages, mask, *, positive=(2.0, 3.0), negative=(3.0, 2.0)):
    """VESPO 2602.10693: ``W^k·exp(λ(1−W))`` of the sequence's whole ratio W weighs each token; (k, λ) by sign of A."""
    log_w = ((logp - logp_old) * mask).sum(-1, keepdim=True).clamp(math.log(1e-8), 20).detach()
    k = torch.where(advantages >= 0, positive[0], negative[0])
    decay = torch.where(advantages >= 0, positive[1], negative[1])
    return -(k * log_w + decay * (1 - log_w.exp())).exp() * advantages * logp


def gpg(logp, logp_old, advantages, mask):
    """GPG 2504.02546: the plain policy gradient."""
    return -logp * advantages


def dro(logp, logp_old, advantages, mask, *, beta=0.1):
    """DRO 2405.19107, token by token as in verl: the plain policy gradient, and half of β·ℓ²."""
    return -logp * advantages + beta / 2 * (logp - logp_old) ** 2


# --- one sign treated another way -------------------------------------------------------------------------------------


def up(logp, logp_old, advantages, mask, *, low=0.2, dual=math.inf):
    """UP 2607.06987, eq. 15: for A > 0 the ratio of the policy to itself, for others PPO."""
    itself = (logp - logp.detach()).exp()
    clipped = surrogate((logp - logp_old).exp(), 1 - low, math.inf, advantages, dual)
    return torch.where(advantages > 0, -itself * advantages, clipped)


def gppo(logp, logp_old, advantages, mask, *, low=0.2, high=0.28, beta_low=1.0, beta_high=1.0, dual=math.inf):
    """GPPO 2508.07629; with betas CE-GPPO 2509.20712: a clipped token keeps β·bound as its weight."""
    ratio = (logp - logp_old).exp()
    itself = ratio / ratio.detach()
    ratio = torch.where((advantages < 0) & (ratio < 1 - low), beta_low * (1 - low) * itself, ratio)
    ratio = torch.where((advantages > 0) & (ratio > 1 + high), beta_high * (1 + high) * itself, ratio)
    objective = ratio * advantages
    if dual < math.inf:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual * advantages), objective)
    return -objective


def aspo(logp, logp_old, advantages, mask, *, low=0.2, high=0.2, max_weight=3.0):
    """ASPO 2510.06062: for A > 0 the ratio turned over, ``π_old·π/sg(π)²``; a capped weight keeps its gradient."""
    ratio = (logp - logp_old).exp()
    itself = ratio / ratio.detach()
    turned = (1 / ratio).detach().clamp(max=max_weight) * itself * (ratio <= 1 + high)
    straight = ratio.detach().clamp(max=max_weight) * itself * (ratio >= 1 - low)
    return -torch.where(advantages < 0, straight, turned) * advantages


def topr(logp, logp_old, advantages, mask):
    """TOPR 2503.14286, eq. 8: weight 1 for A > 0, the ratio π(τ)/μ(τ) of the sequence within [0, 1] for others."""
    product = torch.stack(
        [(row * counted).exp().prod() for row, counted in zip(logp - logp_old, mask, strict=True)]
    )
    tapered = product[:, None].clamp(0, 1).detach()
    return -torch.where(advantages > 0, 1.0, tapered) * advantages * logp


def token_topr(logp, logp_old, advantages, mask):
    """ROLL's ``topr``, token by token: weight 1 for A > 0, the token's ratio within [0, 1] for others."""
    tapered = (logp - logp_old).exp().clamp(0, 1).detach()
    return -torch.where(advantages > 0, 1.0, tapered) * advantages * logp


def opsm(logp, logp_old, advantages, mask, *, delta=0.5, low=0.2, high=0.2):
    """DeepSeek-V3.2 2512.02556, eq. 9: PPO without the sequences of A < 0 and mean ``log(old/new)`` above delta."""
    drifted = mean_of_sequence(logp_old - logp, mask).detach() > delta
    return ppo(logp, logp_old, advantages, mask, low=low, high=high) * ~(drifted & (advantages < 0))


# --- smooth -----------------------------------------------------------------------------------------------------------


def sapo(logp, logp_old, advantages, mask, *, positive=1.0, negative=1.05):
    """SAPO 2511.20347: a sigmoid gate of the ratio, its temperature by the sign of A."""
    tau = torch.where(advantages > 0, positive, negative)
    return -4 / tau * torch.sigmoid(tau * ((logp - logp_old).exp() - 1)) * advantages


def spo(logp, logp_old, advantages, mask, *, epsilon=0.2):
    """SPO 2401.16025, token by token CFPO 2601.22801: a quadratic penalty whose optimum is the bound ``1 ± ε``."""
    ratio = (logp - logp_old).exp()
    return -(ratio * advantages - advantages.abs() * (ratio - 1) ** 2 / (2 * epsilon))


def drpo(logp, logp_old, advantages, mask, *, delta=12.5):
    """DRPO 2606.09821, eq. 8: SPO's penalty weighted by π_old, so that the optimum is ``π_old ± δ``."""
    ratio = (logp - logp_old).exp()
    return -(ratio * advantages - advantages.abs() * logp_old.exp() * (ratio - 1) ** 2 / (2 * delta))


# --- what the papers say besides the formula --------------------------------------------------------------------------


class Facts(NamedTuple):
    """The properties of a method besides its formula, written by hand and not read from the tested code."""

    average: str
    """token-mean; seq-mean-token-mean where a sequence's tokens are averaged first, seq-mean-token-sum where summed."""
    bounds: tuple[float, float] = (0.0, math.inf)
    """The ratios that its rule allows a token of p = 0.08; at most 12.5 by the simplex."""
    dual: float = math.inf
    """The ratio from which a token with A < 0 has no gradient."""
    level: str = "token"
    old_policy: str = "trainer"
    weights: str = "outside"
    """``outside`` if importance weights multiply the loss, ``inside`` if the weight includes them."""
    whole_batch: bool = False
    """True if the method has sums over all tokens of the update."""


TOKENS, SEQUENCES, SUMS = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"
BAND = (0.261695843, 2.410553794)  # binary KL(old‖new) of 0.05 from p = 0.08, found by bisection in 30 digits

PAPER_FACTS = {
    "PPO": Facts(TOKENS, (0.8, 1.2)),  # 1707.06347, one mean over timesteps
    "GRPO": Facts(SEQUENCES, (0.8, 1.2)),  # 2402.03300, eq. 3: 1/G Σ 1/|o|
    "DAPO": Facts(TOKENS, (0.8, 1.28)),  # 2503.14476, eq. 8 and §4.1
    "BandPO": Facts(
        SEQUENCES, BAND, dual=10.0
    ),  # 2603.04918, GRPO's mean; cap and dual clip of its experiments
    "BandAbove": Facts(SEQUENCES, (0.8, BAND[1])),  # ours
    "DPPO": Facts(TOKENS, BAND, old_policy="rollout"),  # 2602.04879 §5.2, authors' code (Stable-RL), SkyRL
    "IcePop": Facts(SEQUENCES, (0.5, 5.0), old_policy="rollout"),  # 2510.18855: 1/G Σ 1/|y|, α = 0.5, β = 5
    "CISPO": Facts(TOKENS, (0.0, 5.0)),  # 2506.13585, eq. 4: 1/Σ|o|; verl's and TRL's upper bound
    "GPPO": Facts(TOKENS, (0.8, 1.28), dual=10.0),  # 2508.07629: ε_h = 0.28; its scripts' clip_ratio_c
    "CEGPPO": Facts(TOKENS, (0.8, 1.2), dual=10.0),  # 2509.20712, its scripts for 1.5B and 7B
    "ASPO": Facts(TOKENS, (0.8, 1.2)),  # 2510.06062
    "UPGRPO": Facts(SEQUENCES, (0.8, 1.2)),  # 2607.06987, GRPO's mean
    "SPO": Facts(TOKENS, (0.8, 1.2)),  # 2401.16025; CFPO 2601.22801
    "DRPO": Facts(TOKENS),  # 2606.09821
    "SAPO": Facts(SEQUENCES),  # 2511.20347, and verl whatever its loss_agg_mode
    # 2510.18927; authors' code: loss_agg_mode, clip_ratio_c; the bounds where no token loses
    "BAPO": Facts(TOKENS, (0.6, 1.2), dual=3.0, whole_batch=True),
    "M2PO": Facts(TOKENS, whole_batch=True),  # 2510.01161: 1/Σ|o|; without a bound where nothing has moved
    "CPPO": Facts(
        TOKENS, (0.0, 2.875), old_policy="rollout"
    ),  # 2606.10968: p ± 0.15; authors' code: loss_agg_mode
    "ClipCov": Facts(
        TOKENS, (0.0, 2.0), whole_batch=True
    ),  # 2505.22617: authors' script, clip_ratio_low and …_high 1
    "GPG": Facts(TOKENS),  # 2504.02546
    "GSPO": Facts(SEQUENCES, (0.9997, 1.0004), level="sequence"),  # 2507.18071, eq. 5 and §5.1
    "GMPO": Facts(SEQUENCES, (0.670320046, 1.491824698)),  # 2507.20673: e^±0.4, mean over sequences
    "VESPO": Facts(TOKENS, weights="inside"),  # 2602.10693; TRL and the authors' code
    "PSPO": Facts(TOKENS),  # 2509.21282: the authors' run, loss_type "dapo"
    "TOPR": Facts(
        SEQUENCES, weights="inside"
    ),  # 2503.14286, eq. 8 and §4.1: divided by the sequence's length
    "TokenTOPR": Facts(SEQUENCES, (0.0, 1.0)),  # ROLL's _compute_topr_loss and its loss_agg_mode
    "KLCov": Facts(TOKENS, whole_batch=True),  # 2505.22617: authors' code, means over the tensors at hand
    "DRO": Facts(TOKENS),  # verl's loss_mode dro
    "PrimeRL": Facts(TOKENS, (0.0, 3.5), old_policy="rollout"),  # prime-rl's DefaultLossConfig: p ± 0.2
    "IPO": Facts(TOKENS, (0.0, 2.25), old_policy="rollout"),  # prime-rl #3418: p ± 0.1
    "MiniRL": Facts(SUMS, (0.8, 1.27), weights="inside"),  # 2512.01374, eq. 7 and §4.2
    "DeepSeekV32": Facts(SEQUENCES, (0.8, 1.2)),  # 2512.02556, eq. 9: 1/G Σ 1/|o|
    "TRM": Facts(TOKENS, old_policy="rollout"),  # 2512.23075; verl's rollout_rs
    "DGPO": Facts(TOKENS, (0.8, 1.2)),  # 2603.14389: verl's clip_ratio and average, which the script leaves
    "MASPO": Facts(TOKENS),  # 2602.17550: authors' code
    "MHPO": Facts(SEQUENCES),  # 2603.16929: 1/K Σ 1/T
    "FIPO": Facts(TOKENS, (0.8, 1.28), dual=10.0),  # 2603.19835: the authors' script for 32B
}
"""From papers, authors' scripts and the frameworks that ship them."""
