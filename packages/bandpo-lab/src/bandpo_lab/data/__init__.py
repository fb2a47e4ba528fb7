"""Prepare problem sets from public hubs, local files or generators for trainers and `bandpo-lab eval`."""
