"""The configuration that a run saved: what is in it, and what its version does not have."""

from rlvet.lint.configuration import Configuration, Unread
from rlvet.lint.known import FRAMEWORKS


def test_an_object_of_the_program_is_saved_and_not_read():
    configuration = Configuration.from_mapping(FRAMEWORKS["trl"], {"epsilon": {}, "generation_kwargs": {}})
    assert isinstance(configuration.settings["epsilon"].value, Unread)
    assert "generation_kwargs" not in configuration.settings
    assert not {"epsilon", "generation_kwargs"} & set(configuration.absent)
