"""`bandpo-lab train`: GRPO with a clip rule, from arguments to a run folder."""
