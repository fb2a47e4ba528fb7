"""Tasks with a verifiable reward that come with the package."""

EMBEDDED = ("multiplication", "lock")
"""Names that ``dataset_name`` may have: modules here with ``dataset(split, n)`` and ``reward``."""
