#!/usr/bin/env bash
#
# Train on GSM8K with verl under a method of bandpo, by two overrides of verl's own trainer.
#
# What it shows: a complete command for verl, in which the last two overrides are bandpo's; a rehearsal of that command
# on a CPU, before GPUs are needed; and the diagnosis of the run from verl's log.
#
# What it needs: Python 3.11 or 3.12 and, in a clone, on every node
#     pip install ./packages/rlvet './packages/bandpo[verl]' './packages/bandpo-lab[verl,eval]' vllm
# The training also needs a GPU, and the model and GSM8K from the Hugging Face hub. The rehearsal needs none of these.
# Only the rehearsal was tested. The GPU memory of the training was not measured.
#
# How to run it, in this order:
#     examples/verl_gsm8k.sh rehearse    # minutes on two CPU cores, with a small random model and made-up data
#     examples/verl_gsm8k.sh data        # writes data/verl/gsm8k-train.parquet and data/verl/gsm8k.parquet
#     examples/verl_gsm8k.sh train       # hours on a GPU
#     examples/verl_gsm8k.sh diagnose    # at any time during the training, or after it
# `overrides` prints the arguments of `python -m verl.trainer.main_ppo`, one per line. Further overrides may follow each
# command, and take precedence: examples/verl_gsm8k.sh train trainer.n_gpus_per_node=8
#
# Settings are variables: METHOD='DAPO()' MODEL=Qwen/Qwen2.5-1.5B-Instruct examples/verl_gsm8k.sh train
#
# What one should see: `rehearse` prints its checks and ends with REHEARSAL PASSED:
#     ok clip: the rule changed the gradient of 324 of 1379 tokens
#     ...
#     REHEARSAL PASSED: 11 checks
# `train` prints a description of the run before Ray starts:
#     bandpo: loss        BandAbove(divergence=KL(), …

set -euo pipefail

METHOD=${METHOD:-BandAbove()}
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-$PWD/data}
OUTPUT=${OUTPUT:-$PWD/runs/gsm8k}

action=${1:-}
shift || true

overrides=(
  data.train_files="$DATA/verl/gsm8k-train.parquet"
  data.val_files="$DATA/verl/gsm8k.parquet"
  data.max_prompt_length=512
  data.max_response_length=1024
  data.filter_overlong_prompts=true

  # bandpo-lab's grader. It reads the answer in \boxed{}, which the prompts of `bandpo-lab data prepare` ask for.
  reward.custom_reward_function.path=pkg://bandpo_lab.evals.grading
  reward.custom_reward_function.name=compute_score

  algorithm.adv_estimator=grpo
  actor_rollout_ref.model.path="$MODEL"
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5
  actor_rollout_ref.actor.strategy=fsdp2
  actor_rollout_ref.actor.optim.lr=1e-6

  # Four updates per batch. With one update every ratio is 1 and no clip has any effect, so bandpo raises an error.
  data.train_batch_size=256
  actor_rollout_ref.actor.ppo_mini_batch_size=64
  actor_rollout_ref.actor.use_dynamic_bsz=true
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384

  trainer.project_name=bandpo-examples
  trainer.experiment_name=gsm8k
  trainer.default_local_dir="$OUTPUT"
  # The file logger writes the log that `rlvet diagnose` reads.
  'trainer.logger=[console,file]'
  trainer.nnodes=1
  trainer.n_gpus_per_node=1
  trainer.total_epochs=5
  trainer.test_freq=10
  trainer.save_freq=50

  # The two overrides of bandpo. Without the second the method is Band(KL(), 0.05).
  actor_rollout_ref.actor.policy_loss._target_=bandpo.integrations.verl.BandPolicyLossConfig
  "+actor_rollout_ref.actor.policy_loss.method='$METHOD'"

  # Those of the command line come last, so that they take precedence.
  "$@"
)

case "$action" in
  rehearse)
    # --stand-in generates data and a random model if they are not on this machine.
    bandpo-lab rehearse --stand-in -- "${overrides[@]}"
    ;;
  data)
    bandpo-lab data prepare gsm8k-train gsm8k --output-dir "$DATA"
    ;;
  train)
    mkdir -p "$OUTPUT"
    export VERL_FILE_LOGGER_PATH="$OUTPUT/metrics.jsonl"
    python -m verl.trainer.main_ppo "${overrides[@]}"
    ;;
  diagnose)
    rlvet diagnose "$OUTPUT"
    ;;
  overrides)
    printf '%s\n' "${overrides[@]}"
    ;;
  *)
    echo "usage: $0 rehearse|data|train|diagnose|overrides [OVERRIDE...]" >&2
    exit 2
    ;;
esac
