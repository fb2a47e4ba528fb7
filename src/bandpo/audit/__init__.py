"""The audit of a run: clip metrics, records of tokens and their replay, checks during training, and alerts."""
