#!/usr/bin/env bash
# A fresh Ray cluster, one call on each machine:  recipes/cluster.sh [--dry-run] head | worker HEAD_ADDRESS | stop
#
#   head                   on the first machine; prints what to call on the others
#   worker HEAD_ADDRESS    on every other one
#   stop                   on each, afterwards; ends every Ray of yours on that machine
#
# Whoever reaches a Ray cluster can run anything on it, so this one asks for a token: `head` makes one in ~/.ray/auth_token.
# Copy that file to the other machines, and `export RAY_AUTH_MODE=token` wherever you call ray or launch.sh.
#
# RAY_PORT (6379), RAY_DASHBOARD_PORT (8265), GPUS and CPUS (what Ray finds), RAY_TMPDIR (/tmp/ray) are read from the environment.
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
port=${RAY_PORT:-6379}
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
common=(--disable-usage-stats ${GPUS:+--num-gpus "$GPUS"} ${CPUS:+--num-cpus "$CPUS"})
case "${1:-} $#" in
  "head 1")
    [ "$RAY_AUTH_MODE" != token ] || "${dry[@]}" ray get-auth-token --generate >/dev/null
    "${dry[@]}" ray start --head --port "$port" --dashboard-host 0.0.0.0 \
      --dashboard-port "${RAY_DASHBOARD_PORT:-8265}" ${RAY_TMPDIR:+--temp-dir "$RAY_TMPDIR"} "${common[@]}"
    echo "on the other machines: recipes/cluster.sh worker $(hostname -I | cut -d' ' -f1):$port"
    ;;
  "worker 2") "${dry[@]}" ray start --address "$2" "${common[@]}" ;;
  "stop 1") "${dry[@]}" ray stop ;;
  *) usage ;;
esac
