"""Parts of the names of metrics that bandpo's audit logs. A test compares them with those that it writes."""

BINS = ("below_1e-4", "1e-4_to_1e-3", "1e-3_to_0.01", "0.01_to_0.1", "above_0.1")
"""The bins of old probability, in ascending order."""

RARE = {"below_0.01": 3, "below_0.1": 4}
"""The number of `BINS`, from the first, that each metric about rare tokens covers."""

COUNTERFACTUALS = ("clip 0.2", "Clip-Higher", "DCPO", "Band")
"""The clip rules that the audit also applies to a run's tokens, as in ``audit/if/Band/clip_high``."""
