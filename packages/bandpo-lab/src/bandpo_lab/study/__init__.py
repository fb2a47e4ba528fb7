"""`bandpo-lab study`: compare clip rules over seeds and settings, and report the results."""
