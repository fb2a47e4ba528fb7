"""`bandpo-lab train`: train with GRPO and a clip rule, from arguments to a run folder."""
