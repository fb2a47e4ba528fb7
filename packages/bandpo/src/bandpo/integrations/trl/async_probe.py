"""A test of the asynchronous trainer's loss before training, as `bandpo.integrations.trl.probe` is for GRPOTrainer.

The trainer computes the method's loss beside TRL's, which only has its metrics and its auxiliary loss. So TRL's own
loss is compared as well: at its epsilons it must be the loss of `FixedClip`, summed over tokens and divided as the
method's is.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from trl.experimental.async_grpo import AsyncGRPOTrainer

from bandpo.certificate.gradient import PolicyTerm
from bandpo.certificate.subject import compare, shares_difference
from bandpo.core.batch import Batch
from bandpo.core.text import as_method
from bandpo.integrations.trl.async_samples import SAMPLES
from bandpo.integrations.trl.probe import TRLSubject, with_bounds
from bandpo.integrations.trl.trl_names import ASYNC_GRPO

if TYPE_CHECKING:
    from torch import Tensor

EPSILONS = (0.2, 0.28)
"""TRL's ``epsilon`` and ``epsilon_high`` in the comparison of its own loss with `FixedClip`."""


class AsyncSubject(TRLSubject):
    """The loss of TRL's AsyncGRPOTrainer: the synthetic tokens in one packed row.

    Args:
        trainer: The trainer.
    """

    names = ASYNC_GRPO
    source = "the model"

    @property
    def age(self) -> Tensor:
        """The age of each sequence's weights, for rules that depend on it: 0, 1 or 2 updates."""
        return torch.arange(len(self.tokens.mask), device=self.tokens.mask.device) % 3

    @property
    def group(self) -> Tensor:
        """The number of each sequence's prompt. Two sequences have the same."""
        return torch.arange(len(self.tokens.mask), device=self.tokens.mask.device) // 2

    @property
    def counted(self) -> Tensor:
        """True for the tokens of a sequence; (rows, columns)."""
        return self.tokens.mask > 0

    @property
    def used(self) -> Tensor:
        """True for the tokens that count."""
        return self.tokens.used > 0

    def make_inputs(self) -> dict[str, Any]:
        """Return the packed row as TRL's collator lays it out, the same on every process."""
        trainer = self.trainer
        tokens = self.tokens
        number = torch.arange(int(self.counted.sum()), device=tokens.mask.device)
        positions = torch.full(tokens.mask.shape, -1, device=tokens.mask.device)
        positions = positions.masked_scatter(self.counted, number)
        rows = torch.arange(len(tokens.mask), device=tokens.mask.device)
        row_of_token = rows[:, None].expand(tokens.mask.shape)
        zeros = torch.zeros_like(number)[None]
        ends = torch.tensor([[0, len(number)]], device=number.device)
        used_on_all = torch.full((1,), float(self.used.sum() * trainer.accelerator.num_processes))
        unknown = torch.full_like(tokens.sequence_advantages, torch.nan)
        version = trainer.state.global_step - self.age
        table = torch.stack([version, self.group, unknown, torch.zeros_like(unknown)], -1)
        return {
            "attention_mask": torch.ones_like(zeros),
            "input_ids": zeros,
            "position_ids": number[None],
            "shift_labels": zeros,
            "token_index": positions[self.used][None],
            "old_log_probs": tokens.logp_old[self.used][None],
            "advantages": tokens.advantages[self.used][None],
            "segment_id": row_of_token[self.used][None],
            "tree_kv_index": number[None],
            "tree_cu_seqlens_q": ends,
            "tree_cu_seqlens_k": ends,
            "tree_max_seqlens": ends[:, 1:].expand(1, 2),
            "global_n_tokens": used_on_all.to(number.device),
            "global_n_forward_tokens": used_on_all.to(number.device),
            "mean_seq_len": torch.ones_like(used_on_all).to(number.device),
            SAMPLES: table[None].double(),
        }

    def read(self) -> Batch:
        tokens = self.tokens
        return Batch.read(
            tokens.logp,
            tokens.logp_old,
            tokens.sequence_advantages,
            tokens.used,
            entropy=tokens.entropy,
            state=self.trainer._state_of_loss(self.age, self.group),
        )

    def trl_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        with with_bounds(self.trainer, torch.inf, torch.inf):
            return AsyncGRPOTrainer.compute_loss(self.trainer, model, inputs)

    def clipped_trl_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Compute TRL's own loss with the clip of `EPSILONS`."""
        with with_bounds(self.trainer, *EPSILONS):
            return AsyncGRPOTrainer.compute_loss(self.trainer, model, inputs)

    def other_terms(self) -> Tensor:
        with self.naming_errors():
            return self.gradient_of(self.trl_loss, advantages=self.filled(0.0))

    def measure_share(self) -> Tensor:
        on_policy = {"old_log_probs": self.tokens.logp[self.used][None]}
        at_zero = self.gradient_of(self.trl_loss, advantages=self.filled(0.0), **on_policy)
        at_one = self.gradient_of(self.trl_loss, advantages=self.filled(1.0), **on_policy)
        return (at_zero - at_one)[0]

    def check_loss(self, share: Tensor) -> None:
        batch = self.batch()
        expected = batch.mask / batch.mask.sum() / self.trainer.args.gradient_accumulation_steps
        difference = shares_difference(share, expected.to(share))
        if difference:
            raise self.problem(
                f"{difference} over the tokens of all processes, divided by the accumulation steps"
            )
        low, high = EPSILONS
        clip = as_method(f"FixedClip({low}, {high})")
        found = compare(PolicyTerm(self.gradient_of(self.clipped_trl_loss)[0], clip, batch, share))
        if not found.equal:
            raise self.problem(
                f"at epsilon={low} and epsilon_high={high} TRL's own loss is not that of {clip!r}, so bandpo does not "
                f"know it: its gradient differs by {found.error:.2g}, {found.cause}; {found.examples[0]}"
            )

    @contextmanager
    def forward(self, logp: Tensor, entropy: Tensor) -> Generator[Any, None, None]:
        def model(**_: Any) -> Any:
            self.is_read = True
            return SimpleNamespace(
                log_probs=logp[self.counted][None], entropy=entropy[self.counted][None], aux_loss=None
            )

        yield model
