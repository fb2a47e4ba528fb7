#!/usr/bin/env bash
# A recipe on a cluster, or with TRL:  recipes/launch.sh [--dry-run] HOW MODEL METHOD [OPTION...]
#
#   HOW     run      here, in the foreground; on the Ray cluster of RAY_ADDRESS if that is set, else on a Ray of its own
#           submit   as a job on a running cluster (RAY_ADDRESS, by default http://127.0.0.1:8265); follows its log
#           trl      with TRL, on one node of 8 GPUs; METHOD is a rule of recipes/paper/rule, OPTION one of `bandpo-lab train`
#   MODEL   and METHOD as for `bandpo-lab run verl`, and so is OPTION: --settings authors, --task apps, trainer.nnodes=2
#
# BANDPO_DATA is the folder that `bandpo-lab data prepare` wrote (default: data), BANDPO_OUTPUT takes checkpoints and logs
# (default: runs); on a cluster, storage that every node sees. W&B stays offline there unless WANDB_MODE says otherwise;
# `wandb sync` uploads later. --dry-run prints the command instead.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  sed -n '2,/^set -/s/^# \{0,1\}//p' "$0" >&2
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

# Folders as options, since neither this shell's folder nor its variables reach the other nodes.
data=$(realpath -m "${BANDPO_DATA:-data}") output=$(realpath -m "${BANDPO_OUTPUT:-runs}")
train=(bandpo-lab run verl --config-dir recipes --model "$model" --method "$rule" --data "$data" --output-dir "$output" "$@")
case $how in
  run) command=("${train[@]}") ;;
  submit)
    command=(ray job submit --address "${RAY_ADDRESS:-http://127.0.0.1:8265}" --working-dir .
      --runtime-env recipes/runtime-env.yaml -- "${train[@]}")
    ;;
  trl)
    value() { sed -n "s/^ *$1: //p" "$2"; }
    rule_file=recipes/paper/rule/$rule.yaml model_file=recipes/paper/model/$model.yaml
    [ -f "$rule_file" ] && [ -f "$model_file" ] || usage
    radius=$(value radius "$rule_file" | sed 's/.*,\(.*\)}/\1/')
    method=$(value method "$rule_file" | sed "s/\${recipe.radius}/$radius/")
    command=(accelerate launch --config_file recipes/paper/accelerate.yaml --no_python bandpo-lab train
      --config recipes/paper/trl.yaml --data_dir "$data/trl" --output_dir "$output/$model-$rule-trl"
      --model_name_or_path "$(value path "$model_file")" --model_revision "$(value revision "$model_file")"
      --method "$method" "$@")
    ;;
  *) usage ;;
esac
if [ ${#dry[@]} -gt 0 ]; then
  "${dry[@]}" "${command[@]}"
  echo
else
  exec "${command[@]}"
fi
