"""Problem sets: from public hubs, local files or generators to what trainers and `bandpo-lab eval` read."""
