"""What the tests of trainings share."""

import os

import pytest

from helpers.forks import ForkServer
from helpers.frameworks import needs

MODULES = ("bandpo_lab.training.train", "bandpo_lab.cli.app", "torch.distributed.launcher.api")


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A process that has imported the trainer once."""
    needs("trl")
    server = ForkServer(tmp_path_factory.mktemp("server"), MODULES, environment=dict(os.environ))
    yield server
    server.close()
