"""A training with verl where rlvet is not installed."""

import pytest

from helpers.without_rlvet import INSTALL, run_without_rlvet

DRIVE = """
from bandpo.integrations.verl.driver import Driver
loss = {"_target_": "bandpo.integrations.verl.BandPolicyLossConfig", "watched": sys.argv[1]}
Driver().prepare({"actor_rollout_ref": {"actor": {"policy_loss": loss}}})
import bandpo.integrations.verl
"""


@pytest.mark.parametrize("watched", ["warn", "off", "stop"])
def test_a_training_with_verl_names_what_is_missing_in_one_line(watched):
    output, errors = run_without_rlvet(DRIVE, watched, status=1 if watched == "stop" else 0)
    lines = [line for line in output.splitlines() if "rlvet" in line]
    if watched == "warn":
        assert lines == [f"bandpo: the run is not checked while it trains, as rlvet is missing: {INSTALL}"]
    else:
        assert lines == []
    if watched == "stop":
        assert errors.splitlines()[-1].endswith(f"watched=stop needs rlvet: {INSTALL}")
