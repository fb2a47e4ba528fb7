"""Limits that the reader of records and the checks share."""

LOGP_SLACK = 0.05
"""Largest value (nats) above 0 that a log-probability may have by rounding. log_softmax over bfloat16 logits of size 10
reaches it."""
