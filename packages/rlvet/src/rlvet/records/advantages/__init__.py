"""Checks of a record's advantages, rewards and masks, a file for each subject.

What reads a record, or runs these checks, is not here, but in the folder above.
"""
