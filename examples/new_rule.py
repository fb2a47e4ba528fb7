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

    OUTPUT
"""

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import softplus

from bandpo import KL, Band, ClipRule, FixedClip, RatioBounds, certify, check, policy_loss


# A rule is a frozen dataclass: its fields are its settings, and its text form is how it is written elsewhere, as in
# ``bandpo-lab train --method "new_rule.OddsClip(1.5)"``.
@dataclass(frozen=True)
class OddsClip(ClipRule):
    """Ratios at which the odds of a token change by at most ``factor``, up or down."""

    factor: float = 1.5

    def bounds(self, logp_old):
        # With the odds multiplied by c, p becomes c·p/(1 − p + c·p). Its ratio to p is c/(1 − p + c·p). The logarithm
        # of the odds is log p − log(1 − p), and 1/(1 − p + c·p) = (1/(1 − p))/(1 + c·o), so that
        # log ratio = log c − log(1 − p) − softplus(log c + log o). This form loses no digits for p near 0 or 1.
        log_rest = torch.log(-torch.expm1(logp_old))  # log(1 − p)
        log_odds = logp_old - log_rest
        width = math.log(self.factor)
        upper = width - log_rest - softplus(log_odds + width)
        lower = -width - log_rest - softplus(log_odds - width)
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


def show_loss():
    """Compute a loss under the rule, and certify one that was written by hand."""
    logp_old = torch.tensor([[0.01, 0.50, 0.90], [0.01, 0.50, 0.90]]).log()
    logp = torch.tensor([[0.02, 0.55, 0.91], [0.005, 0.55, 0.80]]).log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])

    loss, metrics = policy_loss(logp, logp_old, advantages, mask, method=OddsClip(1.5))
    loss.backward()
    print(f"policy_loss: clip_high {metrics['clip_high']:.2f}, clip_low {metrics['clip_low']:.2f}")
    # The first token of each sequence has left its interval in the direction of its advantage: it has no gradient.
    print(f"gradient: {logp.grad[0].tolist()} with A = 1")
    print(f"gradient: {logp.grad[1].tolist()} with A = -1")

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
        certify(loss_with_another_clip, logp.detach(), logp_old, advantages, mask, method=OddsClip(1.04))
    except RuntimeError as error:
        print(error)


if __name__ == "__main__":
    show_bounds()
    show_check()
    show_loss()
