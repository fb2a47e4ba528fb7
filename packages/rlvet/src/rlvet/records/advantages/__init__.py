"""Checks of a record's advantages, rewards and masks, a file for each subject."""
