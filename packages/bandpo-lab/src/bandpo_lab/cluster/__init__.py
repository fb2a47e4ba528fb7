"""The needs of a run of verl at full size: a sound node, an engine, packages, one of verl's trainers, and its cost.

Nothing here composes a recipe or starts a run: see `bandpo_lab.rehearsal`.
"""
