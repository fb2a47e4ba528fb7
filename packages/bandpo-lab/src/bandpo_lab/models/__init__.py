"""Models by their name: those that come in a package, and those that are downloaded at a fixed revision.

No model is trained or sampled here: see `bandpo_lab.training` and `bandpo_lab.evals`.
"""
