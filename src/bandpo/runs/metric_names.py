"""Names of the audit's metrics in a log, which the audit writes and the readers of logs know."""

BINS = ("below_1e-4", "1e-4_to_1e-3", "1e-3_to_0.01", "0.01_to_0.1", "above_0.1")
"""The bins of old probability, as metrics name them."""

RARE = {"below_0.01": 3, "below_0.1": 4}
"""Number of bins that count as rare, in the metrics of that name."""

COUNTERFACTUALS = ("clip 0.2", "Clip-Higher", "DCPO", "Band")
"""The rules that the audit tries on a run's tokens, as metrics name them: ``audit/if/Band/clip_high``."""
