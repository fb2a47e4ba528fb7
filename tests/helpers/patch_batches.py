"""The batches on which the losses of patches for other projects are compared with ours."""

import torch


def batch(seed):
    """Return log-probabilities, advantages and a mask, from rare tokens to nearly certain ones."""
    generator = torch.Generator().manual_seed(seed)
    shape = (8, 64)
    logp_old = torch.where(
        torch.rand(shape, generator=generator) < 0.2,
        -(10 ** (-6 * torch.rand(shape, generator=generator))),
        -20 * torch.rand(shape, generator=generator) - 1e-6,
    )
    moved = torch.randn(shape, generator=generator) * 10 ** (0.5 - 2 * torch.rand(shape, generator=generator))
    logp = (logp_old + moved).clamp(max=-1e-6)
    advantages = torch.randn(8, 1, generator=generator).expand(shape)
    mask = (torch.rand(shape, generator=generator) < 0.8).float()
    mask[:, 0] = 1
    return logp.double(), logp_old.double(), advantages.double(), mask.double()
