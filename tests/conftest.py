import os
from contextlib import suppress
from pathlib import Path

import pytest

with suppress(ImportError):  # not every environment of the matrix has it
    from hypothesis import settings

    # How long an example takes says how busy the machine is.
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder with the real AIME, AMC and GSM8K files."""
    folder = os.environ.get("BANDPO_TEST_DATA")
    if not folder:
        pytest.skip("BANDPO_TEST_DATA, the folder of the real evaluation sets, is not set")
    return Path(folder)
