"""The workshop of bandpo: from data to a trained, evaluated and compared model. Its commands join those of `bandpo`."""

__version__ = "0.1.0"  # bandpo's, which scripts/check_release.py checks
