"""Train any method with TRL's AsyncGRPOTrainer, whose data is sampled while it trains, and audit the training.

TRL's `AsyncGRPOTrainer` trains on a queue of samples that a vLLM server generates with weights of some updates ago. It
has the log-probabilities of the sampler and no others. So the ratio of every method is that to the policy that sampled,
and its bounds surround the probabilities of that policy.

- **What TRL computes.** Its ``compute_loss`` reads the batch, calls the model, and computes PPO's clipped loss, its
  metrics, the accounting of its speed, and the auxiliary loss of a model with experts.
- **What bandpo changes.** TRL's loss gets log-probabilities without a gradient and advantages of 0, so all that is left
  of it is the auxiliary loss. The loss of the method is computed beside it from the log-probabilities with their
  gradient, and divided as TRL divides its own: by the tokens of the micro-batch on all processes, times the number of
  processes, and by the accumulation steps.
- **The reported loss** is that of the method, and the auxiliary loss. TRL's clip metrics get the values of the method,
  as in `BandGRPOTrainer`. Ratio, KL and entropy are TRL's.
- **Versions.** TRL counts the versions of the weights that it publishes. `bandpo.integrations.trl.async_samples` brings
  the version of each sample to the loss, as the optimiser step at which it was published. TRL sets it at the start of a
  group: if new weights arrive during the generation, the later tokens are of newer weights. So the age of a token is an
  upper bound.
- **If TRL changes.** As for `BandGRPOTrainer`: `bandpo.integrations.trl.trl_names` and
  `bandpo.integrations.trl.async_probe`.

This trainer is in ``trl.experimental``. With vLLM it runs on a GPU only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from trl.experimental.async_grpo import AsyncGRPOTrainer

from bandpo.core.batch import Batch
from bandpo.core.errors import InvalidType
from bandpo.core.layout import Packed
from bandpo.integrations._adapt import describe_anchor
from bandpo.integrations.trl.announcements import sampling_settings
from bandpo.integrations.trl.async_config import BandAsyncGRPOConfig
from bandpo.integrations.trl.async_probe import AsyncSubject
from bandpo.integrations.trl.async_samples import SampleCollator, SampleQueue, SampleTable
from bandpo.integrations.trl.method_trainer import ClippedTokens, MethodTrainer
from bandpo.integrations.trl.probe import with_bounds
from bandpo.integrations.trl.training_faults import for_worker, name_of, naming_weights
from bandpo.integrations.trl.trl_names import ASYNC_GRPO

if TYPE_CHECKING:
    from torch import Tensor


class _Outputs:
    """The outputs of a model, with log-probabilities that have no gradient."""

    def __init__(self, outputs: Any) -> None:
        self._outputs = outputs
        self.log_probs = outputs.log_probs.detach()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outputs, name)


class _Model:
    """A model for TRL's loss. It keeps its arguments and its outputs, and returns log-probabilities without a gradient.

    Args:
        model: The model of the trainer.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.outputs: Any = None
        self.arguments: dict[str, Any] = {}

    def __call__(self, **arguments: Any) -> Any:
        self.outputs = self._model(**arguments)
        self.arguments = arguments
        return _Outputs(self.outputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class BandAsyncGRPOTrainer(MethodTrainer, AsyncGRPOTrainer):
    """An `AsyncGRPOTrainer` with the method of ``args`` and an audit.

    What it logs, records and checks is as for `BandGRPOTrainer`. Ratios and bounds refer to the log-probabilities of
    the sampler.

    Raises:
        TypeError: ``args`` is no `BandAsyncGRPOConfig`.
        RuntimeError: at construction: the installed TRL lacks a name of `bandpo.integrations.trl.trl_names`. Before
            training: the gradient of the loss is not the method's, or TRL's own loss is another one than in the
            tested version. In the loss: TRL has other names for its clip metrics.
    """

    args: BandAsyncGRPOConfig
    _trl_names = ASYNC_GRPO

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: BandAsyncGRPOConfig | None = None,
        *arguments: Any,
        **kwargs: Any,
    ):
        args = BandAsyncGRPOConfig() if args is None else args
        if not isinstance(args, BandAsyncGRPOConfig):
            raise InvalidType(f"args must be a BandAsyncGRPOConfig, got {type(args).__name__}")
        ASYNC_GRPO.check_class(AsyncGRPOTrainer)
        self._read_settings(args)
        self._step_of_version: dict[int, int] = {}
        functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        functions = [function for function in functions if function is not None]
        # A sample has the sum of its rewards only.
        self._reward_name = " + ".join(map(name_of, functions))
        super().__init__(model, [*map(for_worker, functions)] or None, args, *arguments, **kwargs)
        ASYNC_GRPO.check_trainer(self)
        self._start_audit("rollout", sampling_settings(args), version_at="group")
        self._settings_at_start = self._clip_settings()
        anchor = describe_anchor(True, "this trainer has no others")
        self._announce(f"ratios and bounds refer to {anchor}")
        self._announce(
            "the age of a token is counted from the weights at the start of its group, so it is an upper bound; TRL "
            f"drops samples that are more than max_staleness={args.max_staleness} versions old"
        )

    def _compare_with_method(self) -> str:
        return AsyncSubject(self).certify()

    # The versions of the weights.

    def _sync_weight(self) -> None:
        super()._sync_weight()
        # On the other processes TRL counts no versions, and the collator does not run.
        self._step_of_version[self.model_version] = self.state.global_step

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        if self._rollout_dataset is not None:  # on the main process, which makes the batches of all
            dataset: Any = self._rollout_dataset
            dataset.queue = SampleQueue(dataset.queue)
            # accelerate's loader iterates over another one, which has the collator.
            base = getattr(loader, "base_dataloader", loader)
            tokenizer: Any = self.processing_class
            end_ids: set[int] = {*cast("Any", self.eos_token_ids), tokenizer.pad_token_id}
            base.collate_fn = SampleCollator(base.collate_fn, self._step_of_version, end_ids)
        return loader

    # The loss.

    @property
    def _loss_metrics(self) -> dict[str, list[Any]]:
        # TRL's loss adds all of its metrics to those of the training.
        return self._metrics["train"]

    def training_step(self, *arguments: Any, **kwargs: Any) -> Tensor:
        self._check_unchanged_settings()
        self._begin_batch()
        loss = super().training_step(*arguments, **kwargs)
        # Each update has a batch of its own, which ends with its last micro-batch.
        if self.accelerator.sync_gradients:
            self._end_batch()
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        called: Any = _Model(model)
        no_advantages = inputs | {"advantages": torch.zeros_like(inputs["advantages"])}
        with self._own_clip_metrics(), with_bounds(self, math.inf, math.inf):
            # Positional arguments, as subclasses and versions of TRL may name them differently.
            other_terms = super().compute_loss(called, no_advantages, return_outputs, num_items_in_batch)
            loss = self._method_loss(inputs, called)
        return loss + other_terms if self.aux_loss_enabled else loss

    def _method_loss(self, inputs: dict[str, Any], called: _Model) -> Tensor:
        """Return the loss of the method, divided as TRL divides its own, and measure its tokens.

        Args:
            inputs: The packed batch.
            called: The model, after its forward pass.
        """
        # TRL selects the same tokens: packed, without padding.
        selected = inputs["token_index"] >= 0
        positions = inputs["token_index"][selected]
        numbers, segments = torch.unique(inputs["segment_id"][selected], return_inverse=True)
        samples = SampleTable.of(inputs, numbers)
        layout = Packed(segments=segments[None])
        age = None if samples.version is None else self.state.global_step - samples.version
        logp = called.outputs.log_probs.flatten()[positions][None]
        with naming_weights(self.model, logp, self.state.global_step):
            batch = Batch.read(
                logp,
                inputs["old_log_probs"][selected][None],
                inputs["advantages"][selected][None],
                layout=layout,
                entropy=called.outputs.entropy.detach().flatten()[positions][None],
                state=self._state_of_loss(age, samples.group),
            )
        if self.training and not self._probing and samples.reward is not None:
            self._check_rewards(samples.reward[:, None], [self._reward_name])

        method = self.loss_method()
        with torch.no_grad():
            tokens = method.tokens(batch)
            objective = method.objective.resolve(batch.state)
            is_clipped = objective.weight(tokens) == 0
            self._clips = ClippedTokens.of(is_clipped, tokens)
            self._log_objective(batch, tokens, objective)
            self._log_age(batch)
            if self.training and not self._probing:
                self._measure(batch, tokens)
                labels = called.arguments["shift_labels"].flatten()[positions][None]
                self._check_and_record(batch, layout, samples, labels)

        tokens_of_process = (inputs["global_n_tokens"][0] / self.accelerator.num_processes).clamp(min=1.0)
        total = method.loss(batch, aggregation="sum").loss
        return total / tokens_of_process.float() / self.current_gradient_accumulation_steps

    def _log_age(self, batch: Batch) -> None:
        """Log mean and maximum of the age of the tokens of all processes, in updates, unless no age is known."""
        age = batch.state.age
        known = torch.zeros(3, device=batch.mask.device)
        if age is not None:
            length = batch.sequences.length[:-1]
            known = torch.stack([(age * length).sum(), length.sum(), age.max()]).float()
        # A process whose ages are unknown takes part, as the others wait for it.
        gathered = cast("Tensor", self.accelerator.gather(known.unsqueeze(0)))
        sums, counts, maxima = gathered.unbind(-1)
        if counts.sum() > 0:
            self._loss_metrics["age_mean"].append((sums.sum() / counts.sum()).item())
            self._loss_metrics["age_max"].append(maxima.max().item())

    def _check_and_record(self, batch: Batch, layout: Packed, samples: SampleTable, labels: Tensor) -> None:
        """Check and record the tokens of a loss.

        Args:
            batch: The tokens.
            layout: Their layout.
            samples: What is known of the samples.
            labels: The ids of the tokens, (1, tokens).
        """
        step = self.state.global_step
        run_watch = None
        if samples.version is not None:  # else nothing says that the data is fresh
            # Each update has a batch of its own, so the number of the batch is that of the update.
            run_watch = self._due_watch(step, 0, samples.version)
        if run_watch is None and self._recorder is None:
            return
        tokens: dict[str, Any] = {
            "logp": batch.logp,
            "logp_old": batch.logp_old,
            "logp_rollout": batch.logp_old,
            "advantages": batch.advantages,
            "entropy": batch.entropy,
            "tokens": labels,
            "group": samples.group,
            "reward": samples.reward,
            "truncated": samples.truncated,
            "generation": step,
            "update": 0,
            "layout": layout,
        }
        if run_watch is not None:
            run_watch.check_batch(**tokens)
        if self._recorder is not None:
            self._recorder.add(**tokens, step=step, version=samples.version, method=self.audited_method())
