#!/bin/sh
# Open an issue with what newest releases changed, update the one that is open, or close it if nothing has changed.
#     scripts/conformance_issue.sh build/drift.md
set -eu
report=$1
label=conformance
title="Conformance: what the newest releases of frameworks changed"

open_issue=$(gh issue list --label "$label" --state open --limit 1 --json number --jq '.[0].number // empty')
if [ -s "$report" ]; then
  if [ -n "$open_issue" ]; then
    gh issue edit "$open_issue" --body-file "$report"
  else
    gh label create "$label" --force --description "Losses of frameworks against the methods here"
    gh issue create --title "$title" --label "$label" --body-file "$report"
  fi
elif [ -n "$open_issue" ]; then
  gh issue close "$open_issue" --comment "The newest releases are as the committed results have them."
fi
