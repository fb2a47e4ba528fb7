"""What the tests of rehearsals share."""

from helpers.settings_files import files_of_settings_are_merged_once  # noqa: F401  (a fixture)
