#!/usr/bin/env bash
# A job of launch.sh or slurm.sbatch:  recipes/job.sh [--dry-run] list | status JOB | log JOB | stop JOB | summary JOB
#
#   list          the jobs of yours, of Slurm and of the Ray cluster of RAY_ADDRESS, where there is one
#   status JOB    whether it waits, runs or has ended
#   log JOB       its log so far, and what follows; Ctrl-C leaves the job running
#   stop JOB      ends it; it is not queued again
#   summary JOB   time per step and GPU memory, from its log
#
# JOB is Slurm's number, whose log is bandpo-JOB.log here (or BANDPO_LOG), or the name that `ray job submit` printed.
# --dry-run prints the command instead.
set -euo pipefail

usage() {
  sed -n '2,/^set -/s/^# \{0,1\}//p' "$0" >&2
  exit 2
}
dry=()
if [ "${1:-}" = --dry-run ]; then
  dry=(echo)
  shift
fi
do_it() { "${dry[@]}" "$@"; }
ray_job=(ray job)
ray_address=(--address "${RAY_ADDRESS:-http://127.0.0.1:8265}")
log=${BANDPO_LOG:-bandpo-${2:-}.log}
case "${1:-} $#" in
  "list 1")
    if command -v squeue >/dev/null; then do_it squeue --me; fi
    if [ -n "${RAY_ADDRESS:-}" ]; then do_it "${ray_job[@]}" list "${ray_address[@]}"; fi
    exit
    ;;
  "status 2" | "log 2" | "stop 2" | "summary 2") ;;
  *) usage ;;
esac
case "$1 $2" in
  status\ *[!0-9]*) do_it "${ray_job[@]}" status "${ray_address[@]}" "$2" ;;
  log\ *[!0-9]*) do_it "${ray_job[@]}" logs --follow "${ray_address[@]}" "$2" ;;
  stop\ *[!0-9]*) do_it "${ray_job[@]}" stop "${ray_address[@]}" "$2" ;;
  summary\ *[!0-9]*)
    if [ ${#dry[@]} -gt 0 ]; then
      do_it "${ray_job[@]}" logs "${ray_address[@]}" "$2"
    else
      "${ray_job[@]}" logs "${ray_address[@]}" "$2" | bandpo-lab recipes summary -
    fi
    ;;
  status\ *) do_it scontrol show job "$2" ;;
  log\ *) do_it tail -n +1 -F "$log" ;;
  stop\ *) do_it scancel "$2" ;;
  summary\ *) do_it bandpo-lab recipes summary "$log" ;;
esac
