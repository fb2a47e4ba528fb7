"""Checks of a record's tokens, a file for each subject.

What reads a record, or runs these checks, is not here, but in the folder above.
"""
