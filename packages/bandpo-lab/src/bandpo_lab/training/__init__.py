"""`bandpo-lab train`: train with GRPO and a clip rule, from arguments to a run folder.

No loss is defined here: the trainers are those of `bandpo.integrations.trl`.
"""
