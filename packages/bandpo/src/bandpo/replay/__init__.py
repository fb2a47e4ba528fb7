"""What methods would do with the tokens of a record, without training again. rlvet reads the record.

rlvet finds this package by the entry points ``rlvet.collectors``.
"""

from bandpo._siblings import require_rlvet

require_rlvet("bandpo.replay")
