"""Write a clip rule, check it, and compare the gradient of a handwritten loss with the rule's.

What it shows: the one method that a rule needs, its bounds beside those of Band and of a fixed clip, a mistake that
`check` finds, `policy_loss` under the new rule, and `certify`, which compares gradients.

The rule bounds the odds p/(1 − p) of a token: they may change by at most a factor, up or down. For a rare token this is
a bound on the ratio of p, and for a common token a bound on the ratio of 1 − p. No probability exceeds 1 under this
rule.

What it needs: ``pip install ./packages/bandpo`` in a clone.

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

from bandpo import KL, Band, Batch, ClipRule, FixedClip, RatioBounds, certify, check, policy_loss


# A rule is a frozen dataclass whose fields are its settings. On the command line and in configs it is written as text:
# ``bandpo-lab train --method "new_rule.OddsClip(1.5)"``.
@dataclass(frozen=True)
class OddsClip(ClipRule):
    """A clip rule under which the odds of a token change by at most ``factor``, up or down."""

    factor: float = 1.5

    def bounds(self, logp_old):
        # If the odds are multiplied by c, p becomes c·p/(1 − p + c·p). The ratio of the two is c/(1 − p + c·p), which
        # is equal to 1/(1 + (1/c − 1)·(1 − p)). Unlike other forms, this one does not subtract nearly equal numbers
        # for p near 0 or 1, and is therefore accurate.
        complement = -torch.expm1(logp_old)  # 1 − p
        upper = -torch.log1p((1 / self.factor - 1) * complement)
        lower = -torch.log1p((self.factor - 1) * complement)
        return RatioBounds(log_lower=lower, log_upper=upper)


# The most common mistake: bounds must be logarithms of ratios, and this rule returns the ratios themselves.
@dataclass(frozen=True)
class ForgotTheLogarithm(OddsClip):
    """`OddsClip` with a mistake."""

    def bounds(self, logp_old):
        correct = super().bounds(logp_old)
        return RatioBounds(log_lower=correct.lower, log_upper=correct.upper)


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
    # `check` calls a rule on a few tokens, and raises an error if its bounds are not those of a valid `ClipRule`.
    # Trainers and commands call it for every rule.
    check(OddsClip(1.5))
    print("check: OddsClip(1.5) is a valid rule")
    try:
        check(ForgotTheLogarithm(1.5))
    except ValueError as error:
        print(f"check: {error}")


def format_values(gradient):
    """Return the values of a tensor as text, with two decimals."""
    return ", ".join(f"{x + 0.0:.2f}" for x in gradient.tolist())  # -0.0 + 0.0 is 0.0


def show_loss():
    """Compute a loss under the rule, and compare the gradients of two handwritten losses with the rule's."""
    logp_old = torch.tensor([[0.10, 0.50, 0.90], [0.10, 0.50, 0.90]]).log()
    logp = torch.tensor([[0.13, 0.55, 0.95], [0.06, 0.55, 0.80]]).log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])

    loss, metrics = policy_loss(logp, logp_old, advantages, mask, method=OddsClip(1.5))
    loss.backward()
    print(f"policy_loss: clip_high {metrics['clip_high']:.2f}, clip_low {metrics['clip_low']:.2f}")
    # A token has no gradient if its ratio is outside the interval in the direction of the advantage: 0.95/0.90 is
    # above the upper bound for p = 0.90, and 0.06/0.10 is below the lower bound for p = 0.10. Padding has none either.
    print(f"gradient: {format_values(logp.grad[0])} with A = 1")
    print(f"gradient: {format_values(logp.grad[1])} with A = -1")

    # The same loss by the formula of the PPO paper. `certify` compares its gradient with the rule's, token by token.
    def handwritten_loss(logp):
        bounds = OddsClip(1.5).bounds(logp_old)
        ratio = (logp - logp_old).exp()
        clipped = ratio.clamp(bounds.lower, bounds.upper)
        surrogate = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
        return -(surrogate * mask).sum() / mask.sum()

    print(
        certify(handwritten_loss, Batch.read(logp.detach(), logp_old, advantages, mask), method=OddsClip(1.5))
    )

    # For a loss with another clip it raises an error, which has the differing tokens and the likely cause.
    def loss_with_another_clip(logp):
        ratio = (logp - logp_old).exp()
        clipped = ratio.clamp(0.8, 1.2)
        surrogate = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
        return -(surrogate * mask).sum() / mask.sum()

    try:
        certify(
            loss_with_another_clip,
            Batch.read(logp.detach(), logp_old, advantages, mask),
            method=OddsClip(1.5),
        )
    except RuntimeError as error:
        print(error)


if __name__ == "__main__":
    show_bounds()
    show_check()
    show_loss()
