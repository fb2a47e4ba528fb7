"""Limits that the operator, the reader of records and the checks share."""

LOGP_SLACK = 0.05
"""Nats above 0 that a log-probability may have by rounding: log_softmax over bf16 logits of size 10 reaches this. A
larger value is no rounding."""
