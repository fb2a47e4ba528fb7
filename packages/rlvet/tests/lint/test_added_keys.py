"""No rule of `rlvet lint` is lost by the keys that bandpo's adapters add to a framework's configuration."""

import pytest
from test_lint_rules import CASES, read

from rlvet.lint.checks import lint_configurations
from rlvet.lint.readers import parse_configurations

POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
ADDED = {
    "trl": [
        "method='Band(KL(), 0.05)'",
        "record='run/tokens'",
        "certify='warn'",
        "anchor='trainer'",
        "audit_steps=2",
        "audit_detail=True",
        "watched='warn'",
    ],
    "verl": [
        f"{POLICY_LOSS}._target_=bandpo.integrations.verl.BandPolicyLossConfig",
        f"\"+{POLICY_LOSS}.method='Band(KL(), 0.05)'\"",
        f"{POLICY_LOSS}._target_=bandpo.integrations.verl.AuditedPolicyLossConfig",
        f"'{POLICY_LOSS}.method=BandPO()'",
        *(
            f"+{POLICY_LOSS}.{key}"
            for key in (
                "record=/data/tokens",
                "average=token-mean",
                "certify=stop",
                "audit=true",
                "audit_detail=true",
                "watched=warn",
            )
        ),
    ],
    "skyrl": [
        "trainer.override_entrypoint=bandpo.integrations.skyrl",
        "trainer.algorithm.method='Band(KL(), 0.05)'",
        "trainer.algorithm.record=/data/tokens",
    ],
}
"""The settings of each adapter, in the form of `test_lint_rules.read`, but for those that replace one of a framework.

prime-rl's own loss has the same keys for any function, see below, and OpenRLHF's hook adds none to its command.
"""


def judged(configurations):
    """Return the rules that are found, and those that are not checked."""
    report = lint_configurations(configurations, "file")
    return sorted(one.id for one in report.findings), sorted(one.id for one in report.unchecked)


ADAPTED = [case[:3] for case in CASES if case[0] in ADDED]


@pytest.mark.parametrize(
    ("framework", "rule", "faulty"),
    ADAPTED,
    ids=[f"{case[0]}-{case[1]}-{i}" for i, case in enumerate(ADAPTED)],
)
def test_keys_of_an_adapter_change_no_judgement(framework, rule, faulty):
    """Each key alone, and all together."""
    _, without = read(framework, faulty)
    found, unchecked = judged(without)
    assert rule in found
    keys = ADDED[framework]
    for added in [*([key] for key in keys), keys]:
        _, configurations = read(framework, [*faulty, *added])
        assert judged(configurations) == (found, unchecked), added


def test_a_file_of_trl_with_the_keys_of_an_adapter_is_known():
    """A file with ``num_generations`` is TRL's if it has no names of another program."""
    text = "num_generations: 1\nbeta: 0.0\n"
    without = parse_configurations(text.encode(), "config.yaml")
    keys = "".join(f"{key.replace('=', ': ')}\n" for key in ADDED["trl"])
    configurations = parse_configurations((text + keys).encode(), "config.yaml")
    assert judged(without)[0] == ["group-of-one"]
    assert judged(configurations) == judged(without)


@pytest.mark.parametrize(
    ("rule", "faulty"),
    [case[1:3] for case in CASES if case[0] == "prime-rl" and "[trainer.loss]" not in case[2]],
)
def test_a_loss_of_ones_own_in_prime_rl_changes_no_judgement(rule, faulty):
    text, without = read("prime-rl", faulty)
    found, unchecked = judged(without)
    assert rule in found
    loss = """
[trainer.loss]
type = "custom"
import_path = "bandpo_prime_rl.loss"

[trainer.loss.kwargs]
method = "Band(KL(), 0.05)"
record = "/runs/mine/tokens"
"""
    assert judged(parse_configurations((text + loss).encode(), "rl.toml")) == (found, unchecked)


OF_THE_LOSS = ("clip-cannot-act", "gspo-clip", "setting-without-effect")
"""The rules about the settings of SkyRL's own losses, which the adapter refuses beside its loss."""


@pytest.mark.parametrize(
    ("rule", "faulty"), [case[1:3] for case in CASES if case[0] == "skyrl" and case[1] not in OF_THE_LOSS]
)
def test_the_loss_of_the_adapter_of_skyrl_changes_no_judgement(rule, faulty):
    _, without = read("skyrl", faulty)
    found, unchecked = judged(without)
    others = [setting for setting in faulty if "policy_loss_type" not in setting]
    _, configurations = read("skyrl", [*others, "trainer.algorithm.policy_loss_type=band"])
    assert rule in found
    assert judged(configurations) == (found, unchecked)


def test_a_method_relative_to_the_sampler_is_no_fault_in_asynchronous_training():
    settings = ["trainer.fully_async.enabled=true", "trainer.algorithm.policy_loss_type=band"]
    for method, found in (("DPPO()", []), ("GSPO()", ["asynchronous-anchor"])):
        _, configurations = read("skyrl", [*settings, f"trainer.algorithm.method='{method}'"])
        assert judged(configurations) == (found, [])
