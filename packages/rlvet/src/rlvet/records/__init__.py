"""Records of tokens: what a record is, its readers, the checks of its tokens and advantages, and its diagnosis.

Reading a record needs numpy and pyarrow, which nothing outside of this folder imports. Only the batches that slime,
miles and SkyRL save with torch need torch. The checks of a log's metrics are in `rlvet.checks`.

- `rlvet.records.run`: `RecordedRun`, from which every diagnosis and audit is computed
- `rlvet.records.record`: `LossBatch`, and the reader of the files that `bandpo.audit.Recorder` writes; their columns
  are in `rlvet.records.format`, their checksums in `rlvet.records.parts`, and missing steps in `rlvet.records.gaps`
- `rlvet.records.dumps`: the reader of batches that frameworks save with their own debug options
- `rlvet.records.first_pass`, `rlvet.records.recorded_advantages`, `rlvet.records.ages`: what the checks need of all
  batches, collected while they are read
- `rlvet.records.tokens`, `rlvet.records.advantages`: a file for each subject of checks, which `token_checks` and
  `advantage_checks` run
- `rlvet.records.diagnosis`: all checks of a record, causes before their effects
"""

from rlvet.records.record import LossBatch
from rlvet.records.run import RecordedRun

__all__ = ["LossBatch", "RecordedRun"]
