"""Write a clip rule of your own, check it, and certify a loss against it.

What it shows: the one method that a rule needs, how its bounds differ from Band's and from a fixed clip's, how
`check` finds a mistake, `policy_loss` under the new rule, and `certify` for a loss that was written by hand.

The rule bounds the odds o = p/(1 − p) of a token: they may change by no more than a factor. For a rare token that is a
bound on its ratio; for a common token it is a bound on the ratio of what is left, 1 − p. No probability exceeds 1
under it, so it stays within the simplex by construction.

What it needs: ``pip install '.[torch]'`` in a clone.

How to run it (about 3 seconds)::

    python examples/new_rule.py

What one should see::

    p    OddsClip(1.5)   Band(KL(), 0.05)   FixedClip(0.2)
     0.001   0.667 to 1.499    0.000 to 10.000   0.800 to 1.200
     ...
     0.990   0.995 to 1.003     0.931 to 1.010   0.800 to 1.200
    check: OddsClip(1.5) is a valid rule
    check: ForgotTheLogarithm(factor=1.5): ... these are ratios, return their logarithms; see docs/write-your-own.md
    policy_loss: clip_high 0.20, clip_low 0.20
    gradient: -0.26, -0.22, 0.00 with A = 1
    gradient: 0.00, 0.22, 0.00 with A = -1
    gradient equals OddsClip(factor=1.5) on 5 tokens (2 beyond a bound), 0e+00
    gradient differs from OddsClip(factor=1.5) ...: it is that of FixedClip(low=0.2, high=0.2): another plug-in, ...
"""

from dataclasses import dataclass

import torch

from bandpo import KL, Band, ClipRule, FixedClip, RatioBounds, certify, check, policy_loss


# A rule is a frozen dataclass: its fields are its settings, and its text form is how it is written elsewhere, as in
# ``bandpo-lab train --method "new_rule.OddsClip(1.5)"``.
@dataclass(frozen=True)
class OddsClip(ClipRule):
    """Ratios at which the odds of a token change by at most ``factor``, up or down."""

    factor: float = 1.5

    def bounds(self, logp_old):
        # With the odds multiplied by c, p becomes c·p/(1 − p + c·p). The ratio to p is c/(1 − p + c·p), which is
        # 1/(1 + (1/c − 1)·(1 − p)). This form is exact for p near 0 and for p near 1, where other forms subtract
        # nearly equal numbers.
        rest = -torch.expm1(logp_old)  # 1 − p
        upper = -torch.log1p((1 / self.factor - 1) * rest)
        lower = -torch.log1p((self.factor - 1) * rest)
        return RatioBounds(log_lower=lower, log_upper=upper)


# The commonest mistake: bounds are logarithms of ratios, and this rule returns the ratios themselves.
@dataclass(frozen=True)
class ForgotTheLogarithm(OddsClip):
    """`OddsClip` with a mistake in it."""

    def bounds(self, logp_old):
        right = super().bounds(logp_old)
        return RatioBounds(log_lower=right.lower, log_upper=right.upper)


def show_bounds():
    """Print the bounds of three rules for rare and for common tokens."""
    probabilities = torch.tensor([0.001, 0.01, 0.1, 0.5, 0.9, 0.99])
    print(f"{'p':>6}  {'OddsClip(1.5)':>15}  {'Band(KL(), 0.05)':>17}  {'FixedClip(0.2)':>15}")
    rules = (OddsClip(1.5), Band(KL(), 0.05), FixedClip(0.2))
    intervals = [rule.bounds(probabilities.log()) for rule in rules]
    for i, p in enumerate(probabilities.tolist()):
        columns = [f"{x.lower.flatten()[i]:.3f} to {x.upper.flatten()[i]:.3f}" for x in intervals]
        print(f"{p:6.3f}  {columns[0]:>15}  {columns[1]:>17}  {columns[2]:>15}")


def show_check():
    """Check the rule, and the one with the mistake."""
    # `check` tries a rule on a few tokens. It returns nothing if the rule keeps what `ClipRule` promises. Trainers and
    # commands call it by themselves.
    check(OddsClip(1.5))
    print("check: OddsClip(1.5) is a valid rule")
    try:
        check(ForgotTheLogarithm(1.5))
    except ValueError as error:
        print(f"check: {error}")


def rounded(gradient):
    """Return the values of a tensor as text; 0 has no sign."""
    return ", ".join(f"{x + 0.0:.2f}" for x in gradient.tolist())


def show_loss():
    """Compute a loss under the rule, and certify one that was written by hand."""
    logp_old = torch.tensor([[0.10, 0.50, 0.90], [0.10, 0.50, 0.90]]).log()
    logp = torch.tensor([[0.13, 0.55, 0.95], [0.06, 0.55, 0.80]]).log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])

    loss, metrics = policy_loss(logp, logp_old, advantages, mask, method=OddsClip(1.5))
    loss.backward()
    print(f"policy_loss: clip_high {metrics['clip_high']:.2f}, clip_low {metrics['clip_low']:.2f}")
    # Where a ratio has left the interval in the direction of the advantage, the token has no gradient: 0.95/0.90 is
    # above the bound of a common token, and 0.06/0.10 is below that of a rare one. The padding has none either.
    print(f"gradient: {rounded(logp.grad[0])} with A = 1")
    print(f"gradient: {rounded(logp.grad[1])} with A = -1")

    # The same loss from the formula of the PPO paper. `certify` compares its gradient with the rule's, token by token.
    def loss_by_hand(logp):
        bounds = OddsClip(1.5).bounds(logp_old)
        ratio = (logp - logp_old).exp()
        clipped = ratio.clamp(bounds.lower, bounds.upper)
        gain = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
        return -(gain * mask).sum() / mask.sum()

    print(certify(loss_by_hand, logp.detach(), logp_old, advantages, mask, method=OddsClip(1.5)))

    # A loss with another clip is refused, with the tokens and the likely cause.
    def loss_with_another_clip(logp):
        ratio = (logp - logp_old).exp()
        gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
        return -(gain * mask).sum() / mask.sum()

    try:
        certify(loss_with_another_clip, logp.detach(), logp_old, advantages, mask, method=OddsClip(1.5))
    except RuntimeError as error:
        print(error)


if __name__ == "__main__":
    show_bounds()
    show_check()
    show_loss()
