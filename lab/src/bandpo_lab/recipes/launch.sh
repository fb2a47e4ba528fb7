#!/usr/bin/env bash
# One launcher for every recipe:  recipes/launch.sh [--dry-run] HOW MODEL RULE [OVERRIDE...]
#
#   HOW    rehearse  small, on this machine's CPU; --stand-in after RULE makes up data that is not on it
#          run       here, in the foreground; on the Ray cluster of RAY_ADDRESS if that is set, else on a Ray of its own
#          submit    as a job on a running cluster (RAY_ADDRESS, by default http://127.0.0.1:8265); follows its log
#          trl       the same with TRL, on one node of 8 GPUs; overrides are options of `bandpo train`
#   MODEL  a file of recipes/paper/model, RULE one of recipes/paper/rule, without .yaml
#   OVERRIDE  of verl, e.g. trainer.nnodes=2 or +dapo=dynamic-sampling; +paper=authors for the authors' own settings
#             (`recommended` if left out), +paper/arm=... and +paper/task=... for their other experiments
#
# BANDPO_DATA is the folder that `bandpo data prepare` wrote (default: data), BANDPO_OUTPUT takes checkpoints and logs
# (default: runs); on a cluster, storage that every node sees. W&B stays offline there unless WANDB_MODE says otherwise;
# `wandb sync` uploads later. --dry-run prints the command instead.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  sed -n '2,/^set -/s/^# \{0,1\}//p' "$0" >&2
  echo "models: $(find recipes/paper/model -name '*.yaml' -exec basename {} .yaml \; | sort | tr '\n' ' ')" >&2
  echo "rules:  $(find recipes/paper/rule -name '*.yaml' -exec basename {} .yaml \; | sort | tr '\n' ' ')" >&2
  exit 2
}

dry=()
if [ "${1:-}" = --dry-run ]; then
  dry=(printf '%q ')
  shift
fi
[ $# -ge 3 ] || usage
how=$1 model=$2 rule=$3
shift 3
[ -f "recipes/paper/model/$model.yaml" ] && [ -f "recipes/paper/rule/$rule.yaml" ] || usage

# Folders as overrides, since neither this shell's folder nor its variables reach the other nodes.
data=$(realpath -m "${BANDPO_DATA:-data}") output=$(realpath -m "${BANDPO_OUTPUT:-runs}")
# The variant stands behind model and rule, since it may replace their settings; arms and tasks replace the variant's.
variant=+paper=recommended others=()
for word in "$@"; do
  case $word in +paper=*) variant=$word ;; *) others+=("$word") ;; esac
done
overrides=("+paper/model=$model" "+paper/rule=$rule" "$variant" "recipe.data=$data" "${others[@]}")
train=(python -m verl.trainer.main_ppo --config-dir recipes "${overrides[@]}" "recipe.output=$output"
  "+ray_kwargs.ray_init.runtime_env.env_vars={WANDB_MODE:${WANDB_MODE:-offline},WANDB_DIR:$output}")
case $how in
  rehearse) command=(bandpo rehearse --config-dir recipes "${overrides[@]}") ;;
  run) command=("${train[@]}") ;;
  submit)
    command=(ray job submit --address "${RAY_ADDRESS:-http://127.0.0.1:8265}" --working-dir .
      --runtime-env recipes/runtime-env.yaml -- "${train[@]}")
    ;;
  trl)
    value() { sed -n "s/^ *$1: //p" "$2"; }
    rule_file=recipes/paper/rule/$rule.yaml
    clip=$(value clip "$rule_file" | sed "s/\${recipe.radius}/$(value radius "$rule_file")/")
    command=(accelerate launch --config_file recipes/paper/accelerate.yaml --no_python bandpo train
      --config recipes/paper/trl.yaml --data_dir "$data/trl" --output_dir "$output/$model-$rule-trl"
      --model_name_or_path "$(value path "recipes/paper/model/$model.yaml")"
      --clip "$clip" "$@")
    ;;
  *) usage ;;
esac
if [ ${#dry[@]} -gt 0 ]; then
  "${dry[@]}" "${command[@]}"
  echo
else
  exec "${command[@]}"
fi
