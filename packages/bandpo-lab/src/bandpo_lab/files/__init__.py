"""Read files that a stranger may have written, validate them, write files whole or not at all, and check digests.

What the content of a file means is not here: each reader of a format is in the folder that uses it.
"""
