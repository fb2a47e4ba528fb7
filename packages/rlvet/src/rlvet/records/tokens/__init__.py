"""Checks of a record's tokens, a file for each subject."""
