"""Compute the loss of a packed batch: several sequences one after the other in one row, without padding.

What it shows: the three ways to describe a packed batch (``Packed(segments=…)``, ``Packed(cu_seqlens=…)``, jagged
tensors), each with the loss and gradient of the padded batch, and the error without a description. `Batch.read` accepts
the same layouts, for `Audit`, `certify` and `Recorder`.

What it needs: ``pip install ./packages/bandpo`` in a clone.

How to run it (about 3 seconds)::

    python examples/packed_batch.py
    python examples/packed_batch.py --method "GSPO()"

What one should see::

    4 sequences of 7, 2, 12, 3 tokens: 24 packed tokens in place of 48 padded ones
    padded      loss -0.0374  largest gradient 0.4626
    segments    loss -0.0374  largest gradient 0.4626
    cu_seqlens  loss -0.0374  largest gradient 0.4626
    jagged      loss -0.0374  largest gradient 0.4626
    without:    row 0 looks packed: its advantages change from 1 to -1 at token 7 ...
"""

import argparse

import torch
from torch import nn

from bandpo import Packed, linear_logp, policy_loss

LENGTHS = torch.tensor([7, 2, 12, 3])
VOCABULARY = 50
WIDTH = 16


def padded_batch():
    """Return random token ids and hidden states, and a mask, each with one row per sequence."""
    shape = (len(LENGTHS), int(LENGTHS.max()))
    mask = (torch.arange(shape[1]) < LENGTHS[:, None]).float()
    return torch.randint(VOCABULARY, shape), torch.randn(*shape, WIDTH), mask


def main():
    """Compute the loss of the same batch in four forms."""
    parser = argparse.ArgumentParser(description="Compute the loss of a packed batch.")
    parser.add_argument("--method", default="BandPO()", help="A method: 'GRPO()', 'GSPO()', ...")
    method = parser.parse_args().method

    torch.manual_seed(0)
    ids, hidden, mask = padded_batch()
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    old_head = head.weight.detach() + 0.1 * torch.randn(VOCABULARY, WIDTH)

    # A packed row has the tokens of all sequences without padding.
    is_token = mask.bool()
    packed_ids = ids[is_token][None]
    packed_hidden = hidden[is_token][None]
    print(
        f"{len(LENGTHS)} sequences of {', '.join(map(str, LENGTHS.tolist()))} tokens: {packed_ids.numel()} packed "
        f"tokens in place of {ids.numel()} padded ones"
    )

    # The number of each token's sequence, computed from position ids that start at 0 in each sequence, as trainers pass
    # them to the model.
    position_ids = torch.cat([torch.arange(int(length)) for length in LENGTHS])[None]
    segments = (position_ids == 0).cumsum(-1) - 1
    # FlashAttention's form: the start of each sequence, and the end of the last one.
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), LENGTHS.cumsum(0)])
    # PyTorch's nested tensors contain the lengths themselves.
    jagged_ids = torch.nested.nested_tensor_from_jagged(ids[is_token], cu_seqlens)
    jagged_hidden = torch.nested.nested_tensor_from_jagged(hidden[is_token], cu_seqlens)

    def show(name, hidden, ids, **arguments):
        """Print the loss of one form of the batch, and the largest gradient of the head's weights."""
        head.zero_grad()
        logp = linear_logp(hidden, head.weight, ids).logp
        with torch.no_grad():
            logp_old = linear_logp(hidden, old_head, ids).logp
        loss = policy_loss(logp, logp_old, method=method, **arguments).loss
        loss.backward()
        print(f"{name:11s} loss {loss:.4f}  largest gradient {head.weight.grad.abs().max():.4f}")

    show("padded", hidden, ids, advantages=advantages, mask=mask)
    show("segments", packed_hidden, packed_ids, advantages=advantages, layout=Packed(segments=segments))
    show("cu_seqlens", packed_hidden, packed_ids, advantages=advantages, layout=Packed(cu_seqlens=cu_seqlens))
    show("jagged", jagged_hidden, jagged_ids, advantages=advantages)

    # Without a description, the advantages per token reveal that the row is packed, and the loss raises an error.
    try:
        show("without", packed_hidden, packed_ids, advantages=advantages[segments])
    except ValueError as error:
        print(f"without:    {error}")


if __name__ == "__main__":
    main()
