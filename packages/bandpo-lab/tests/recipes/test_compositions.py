"""What verl would do with settings that a user may write: the loss that was asked for, or a refusal.

Each row has what it starts from, the overrides, and the outcome: ``= METHOD`` is what the worker's loss has to train
and the driver to say, ``> TEXT`` a line that the driver prints, the rest a refusal before Ray starts.
"""

import re
import shlex

import pytest

from helpers.frameworks import needs

needs("verl")

import torch
from hydra.errors import HydraException
from integrations.test_verl import batch, begin, evaluate
from omegaconf.errors import OmegaConfBaseException
from typer.testing import CliRunner
from verl.utils import config as verls_settings

from bandpo import Rows, policy_loss
from bandpo.core.text import as_method
from bandpo.integrations.verl import loss_method
from bandpo_lab.cli import run
from bandpo_lab.cli.app import app
from bandpo_lab.cli.recipes import SHIPPED
from bandpo_lab.rehearsal.shrink import compose

A, L = "actor_rollout_ref.actor.", "actor_rollout_ref.actor.policy_loss."
C, D, V = "algorithm.rollout_correction.", "distillation.distillation_loss.", "trainer.v1."
OURS = f"{L}_target_=bandpo.integrations.verl.BandPolicyLossConfig"
AUDITED = f"{L}_target_=bandpo.integrations.verl.AuditedPolicyLossConfig"
SIZES = "data.train_batch_size=256 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8"
SIZES += f" algorithm.adv_estimator=grpo {A}ppo_mini_batch_size=64 {A}ppo_micro_batch_size_per_gpu=8"
EXPERIMENT = "+paper/model=qwen2.5-3b-instruct +paper/rule=band-kl"
STARTS = {
    "band": f"{SIZES} {OURS}",
    "audit": f"{SIZES} {AUDITED}",
    "stock": SIZES,
    "recipe": f"{EXPERIMENT} +paper=recommended",
    "groups": "",
    "launch": "--model qwen2.5-3b-instruct --method",
}
BAND, BAND_10 = (f"Method(Band(KL(), 0.05), DualClip({most}))" for most in (3, 10))

ROWS = r"""
band   |                                        | = BAND
band   | L.loss_mode=vanilla                    | = BAND
band   | L.loss_mode=band                       | = BAND
band   | L.loss_mode=gspo                       | loss_mode: 'gspo' reads no method: write loss_mode=band
band   | L.loss_mode=Band                       | loss_mode: 'Band' reads no method
band   | L.loss_mode=null                       | loss_mode: None reads no method
band   | +L.method='FixedClip(0.2, 0.28)'       | = Method(FixedClip(0.2, 0.28), DualClip(3))
band   | +L.method='SAPO(1.0, 1.05)'            | = SAPO(1.0, 1.05)
band   | +L.method=GSPO                         | = GSPO()
band   | +L.method='GRPO(0.1)'                  | = GRPO(0.1)
band   | +L.method='GRPO(0.1)' A.clip_ratio_c=9 | clip_ratio_c=9 has no effect beside GRPO
band   | +L.method='BandPO(dual_clip=2)'        | = BandPO(dual_clip=2)
band   | A.clip_ratio_c=inf                     | = Method(Band(KL(), 0.05), DualClip(inf))
band   | +L.method='Unclipped()' A.ppo_mini_batch_size=256 | = Method(Unclipped(), DualClip(3))
band   | +L.method='FixedClip(1, 0.2)'          | = Method(FixedClip(1, 0.2), DualClip(3))
band   | +L.method='FixedClip(0.8, 1.28)'       | > ratios +0.2 to 2.28 at p = 0.01
band   | +L.method='Band(KL(), 1e-9)'           | > ratios .*0.99996 to 1 at p = 0.5
band   | L.method='FixedClip()'                 | To append to your config use \+
band   | +L.method=FixedClip(0.2,0.28)          | Unknown function 'FixedClip'
band   | +L.method=0.2                          | method: method must be a method .* or its text, got 0.2
band   | +L.method=''                           | method: '' cannot be read
band   | +L.method=null                         | method is null: leave it out
band   | +L.method=grpo                         | did you mean GRPO\?
band   | +L.method='DualClip(3)'                | method: 'DualClip\(3\)' is not a method
band   | +L.method='DropOutside(20)'            | is not a method
band   | +L.method='Bamd(KL(), 0.05)'           | method: .*did you mean Band
band   | +L.method='Band(0.05)'                 | Band's first argument is the divergence
band   | +L.method='Band(KL(), 0,05)'           | method: 'Band.*' cannot be read
band   | +L.method='Band(KL(), -1)'             | radius must be a finite number above 0, got -1
band   | +L.method='Band(KL(), 5)'              | block a ratio above 1
band   | +L.method='Band(KL(), Linear(0.05, 0.01))' | method: .* does not pass to its loss
band   | +L.method='FixedClip(0.2, 28)'         | block a ratio above 1
band   | +L.method='FixedClip(0.99, 0.2)'       | block a ratio below 1
band   | +L.method='FixedClip(low=0.2, low=0.3)' | an argument is given twice
band   | +L.method='DPPO()'                     | bypass_mode=true.*method=.Method\(clip=Band
band   | +L.method='IcePop()' algorithm.rollout_correction=null | bypass_mode=true
band   | +L.method='DPPO()' C.bypass_mode=true  | = DPPO()
band   | +L.method='BAPO()'                     | > loss +BAPO\(share=0.5
band   | +L.method='BAPO()' A.ppo_micro_batch_size_per_gpu=4 | BAPO.* has sums .*use_dynamic_bsz=false
band   | +L.method='BAPO()' actor_rollout_ref.rollout.n=2 | BAPO.* has sums .*use_dynamic_bsz=false
band   | +L.method='BAPO()' A.use_dynamic_bsz=true | BAPO.* has sums .*use_dynamic_bsz=false
band   | +L.rule='FixedClip()'                  | unexpected keyword argument 'rule'
band   | +L.certify=false                       | certify must be 'stop', 'warn' or 'off', got False
band   | +L.audited=gspo                        | loss_mode: 'gspo' reads no method
band   | A.clip_ratio=0.1                       | clip_ratio=0.1: it would have no effect, as the method
band   | A.clip_ratio_high=0.28                 | clip_ratio_high=0.28: it would have no effect
band   | +L.method='SAPO()' A.tau_neg=2         | tau_neg=2: it is a setting of verl's loss sapo
band   | L.dro_beta=0.5                         | dro_beta=0.5: it is a setting of verl's loss dro
band   | A.clip_ratio_c=0.5                     | clip_ratio_c: DualClip's max_ratio must be above 1, got 0.5
band   | +A.method='FixedClip()'                | A.method: verl does not look there; write L.method
band   | +method='FixedClip()'                    | ^method: verl does not look there; write L.method
band   | +policy_loss.method='FixedClip()'      | ^policy_loss.method: verl does not look there; write L.method
band   | +actor_rollout_ref.policy_loss.method='FixedClip()' | method: verl does not look there; write L.method
band   | +policy_loss._target_=bandpo.integrations.verl.BandPolicyLossConfig | _target_: verl does not look there
band   | +algorithm.clip_ratio=0.3              | clip_ratio: verl does not look there; write A.clip_ratio
band   | +ppo_epochs=2                          | ppo_epochs: verl does not look there; write A.ppo_epochs
band   | +trainer.ppo_mini_batch_size=32        | size: verl does not look there; write A.ppo_mini_batch_size
band   | +data.train_batch_sise=512             | data.train_batch_sise: .* did you mean data.train_batch_size
band   | +algorithm.filter_groups.enabled=true  | groups.enabled: .* did you mean algorithm.filter_groups.enable
band   | +data.curriculum=easy                  | > not verl's +data.curriculum: verl has no settings
band   | A.loss_agg_mode=token_mean             | Invalid loss_agg_mode: token_mean
band   | A.loss_agg_mode=seq-mean-token-sum-norm | loss_agg_mode=seq-mean-token-sum-norm: without .*loss_scale_factor
band   | A.loss_agg_mode=seq-mean-token-sum +L.method='GRPO()' | loss_agg_mode=seq-mean-token-sum contradicts GRPO
band   | A.loss_agg_mode=seq-mean-token-sum +L.method='GRPO()' +L.average=framework | > average +seq-mean-token-sum,
band   | +L.method='GRPO()'                     | > average +seq-mean-token-mean
band   | A.ppo_mini_batch_size=256              | ppo_mini_batch_size: there is one update for each batch
band   | A.ppo_mini_batch_size=256 +L.accept_idle_clip=true | > clip +Band.* never acts, as every ratio is 1
band   | A.ppo_mini_batch_size=256 +L.method='SAPO()' | there is one update for each batch
band   | A.ppo_mini_batch_size=256 +L.method='GPG()' | = GPG()
band   | A.ppo_mini_batch_size=512 A.use_dynamic_bsz=true | there is one update for each batch
band   | A.ppo_mini_batch_size=0                | ppo_mini_batch_size must be a whole number of at least 1, got 0
band   | A.ppo_epochs=0                         | ppo_epochs must be a whole number of at least 1, got 0
band   | A.ppo_mini_batch_size=256 A.ppo_epochs=2 | > updates +2 for each batch of 256
band   | A.ppo_mini_batch_size=100              | > updates +3 for each batch of 256
band   | critic.enable=true critic.ppo_mini_batch_size=96 | > updates +6 for each batch of 256
band   | algorithm.adv_estimator=gae critic.ppo_mini_batch_size=96 | > updates +6 .*\n.*\n.* advantages of gae
band   | trainer.critic_warmup=10               | > updates +4 for each batch of 256 × 1 responses, from step 10
band   | V.trainer_mode=separate_async | > updates +4 for each batch of 256
band   | V.trainer_mode=separate_async V.separate_async.parameter_sync_step=1 | > updates +4 for
band   | V.trainer_mode=colocate_async A.ppo_mini_batch_size=256 | there is one update for each batch
band   | +V.sync.parameter_sync_step=4 | there is one update for each batch
band   | A.ppo_mini_batch_size=256 C.bypass_mode=true | = BAND
band   | C.bypass_mode=true C.loss_type=reinforce | loss_type=reinforce has
band   | distillation.enabled=true              | > loss .*, and verl's distillation
band   | distillation.enabled=true D.use_task_rewards=false | leaves out the policy loss
band   | algorithm.filter_groups.enable=true trainer.use_v1=false | use_v1=false ignores it
stock  | L.loss_mode=band                       | = BAND
stock  | L.loss_mode=audited                    | no policy loss is named 'audited' of band, bypass_mode
stock  | L.loss_mode=gspoo                      | no policy loss is named 'gspoo' of band, .*gspo
stock  | L.loss_mode=band +L.method='FixedClip()' | unexpected keyword argument 'method'
stock  | L._target_=bandpo.integrations.verl.BandPolicyLosConfig | Error loading 'bandpo.*LosConfig'
audit  |                                        | > loss +verl's vanilla, Method\(clip=FixedClip\(low=0.2
audit  | L.loss_mode=gspo A.clip_ratio_high=0.3 | > loss +verl's gspo, GSPO\(low=0.2, high=0.3\)
audit  | L.loss_mode=gspoo                      | no policy loss is named 'gspoo' of
audit  | L.loss_mode=band                       | _target_: write BandPolicyLossConfig
audit  | +L.method='GSPO()'                     | unexpected keyword argument 'method'
audit  | +L.audited=gspo +L.audit=false         | audited is not to be set: name the loss in loss_mode
audit  | L.loss_mode=audited                    | audited is not to be set: name the loss in loss_mode
audit  | L.loss_mode=mine actor_rollout_ref.model.external_lib=mine | > loss +verl's mine
recipe |                                        | = BAND_10
recipe | recipe.radius=0.1                      | = Method(Band(KL(), 0.1), DualClip(10))
recipe | recipe.radius=5                        | block a ratio above 1
recipe | recipe.radius=0,03                     | Ambiguous value for argument 'recipe.radius=0,03'
recipe | L.loss_mode=vanilla                    | = BAND_10
recipe | L.method='FixedClip(0.3)'              | = Method(FixedClip(0.3), DualClip(10))
recipe | ~L.method                                | = BAND_10
recipe | +L.method='GSPO()'                     | An item is already at
recipe | L._target_=verl.workers.config.PolicyLossConfig | unexpected keyword argument 'method'
recipe | paper/rule=grpo                        | = Method(FixedClip(0.2), DualClip(10))
recipe | +paper/rule=grpo                       | Multiple values for paper/rule
recipe | +dapo=dynamic_sampling                 | Could not find 'dapo/dynamic_sampling'
recipe | +dapo=dynamic-sampling trainer.use_v1=false | use_v1=false ignores it
groups | EXPERIMENT +paper=authors              | = BAND_10
groups | EXPERIMENT                             | unexpected keyword argument 'method'
groups | +paper=recommended                     | Interpolation key 'recipe.\w+' not found
groups | +paper/model=qwen2.5-3b-instruct +paper/rule=[grpo,band-kl] +paper=recommended | = BAND_10
launch | band-kl                                | = BAND_10
launch | grpo                                   | = Method(FixedClip(0.2), DualClip(10))
launch | band-tv --settings authors recipe.radius=0.1 | = Method(Band(TotalVariation(), 0.1), DualClip(10))
launch | band-kl -- +recipe.every_radius=0.1    | = Method(Band(KL(), 0.1), DualClip(10))
launch | 'GSPO(0.01)'                           | = GSPO(0.01)
launch | vanilla                                | > loss +verl's vanilla, Method\(clip=FixedClip\(low=0.2
launch | 'GSPO(0.01'                            | 'GSPO\(0.01' cannot be read
launch | grpo --settings author                 | 'author' is none of authors, recommended in
launch | grpo --task chess                      | 'chess' is none of apps, commonsenseqa in
launch | band-kl L.loss_mode=vanilla            | loss_mode=vanilla contradicts L._target_
launch | band-kl L.method='FixedClip()' ++L.method='CISPO()' | method is set twice
launch | band-kl OURS AUDITED                   | _target_ is set twice
launch | band-kl +recipe.radis=0.03             | recipe.radis is not used
launch | grpo +recipe.radius=0.03               | recipe.radius is not used
launch | band-kl +paper/rule=[grpo,band-kl]     | the last of them would replace|Multiple values
launch | band-kl +paper/arm=dapo                | > average +token-mean$
launch | 'DAPO()'                               | > average +token-mean, the method's own; loss_agg_mode=seq
launch | 'PPO()'                                | > average +token-mean, the method's own
launch | 'CISPO()' L.average=framework          | > average +seq-mean-token-mean, verl's loss_agg_mode
launch | 'BandPO()' +paper/arm=dapo             | > average +token-mean, verl's loss_agg_mode, in place of the
launch | 'GRPO()' +paper/arm=dapo               | > average +token-mean, verl's loss_agg_mode, in place of the
launch | 'GRPO()'                               | > dual clip +the method's own or none; clip_ratio_c=10.0
launch | vanilla +paper/arm=dapo                | > average +token-mean$
launch | 'BAPO()'                               | BAPO.* has sums .*use_dynamic_bsz=false
launch | 'KLCov()' --settings authors           | KLCov.* has sums .*use_dynamic_bsz=false
"""


def written(text: str) -> str:
    """With the names of this file for what they stand for."""
    text = re.sub(r"\b([ACDLV])\.(?=\w)", lambda found: globals()[found[1]], text)
    return re.sub(r"\b(OURS|AUDITED|EXPERIMENT|BAND_10|BAND)\b", lambda found: globals()[found[1]], text)


CASES = [re.split(r" +\| ", row) for row in ROWS.strip().splitlines()]


@pytest.mark.filterwarnings("ignore:Disabled critic:UserWarning")  # verl's
@pytest.mark.parametrize(("start", "overrides", "outcome"), CASES, ids=lambda text: text[:60])
def test_what_is_asked_for_is_trained_or_refused(start, overrides, outcome, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, outcome = f"{STARTS[start]} {written(overrides)}", written(outcome)

    def validated():
        """As the command does before Ray starts."""
        chosen = [
            word.strip("'") if word[0] == "'" else word for word in re.findall(r"(?:'[^']*'|\S)+", words)
        ]
        if start == "launch":
            told = CliRunner().invoke(app, ["run", "verl", "--dry-run", *chosen], catch_exceptions=False)
            config = run._compose_and_check(shlex.split(told.output)[5:-1], SHIPPED)
        else:
            config = compose(chosen, SHIPPED if start in ("recipe", "groups") else None, "ppo_trainer")
        begin(config)
        return config

    if outcome[0] not in "=>":
        with pytest.raises((ValueError, TypeError, HydraException, OmegaConfBaseException)) as refused:
            validated()
        assert re.search(outcome, f"{refused.value} {refused.value.__cause__}")
        return
    actor = verls_settings.omega_conf_to_dataclass(validated().actor_rollout_ref.actor)
    said = capsys.readouterr().out
    if outcome[0] == ">":
        assert re.search(outcome[2:], said, re.MULTILINE)
        return
    asked, tensors = as_method(outcome[2:]), batch(5, spread=1.2)
    assert loss_method(actor) == asked
    assert as_method(re.search("bandpo: loss +(.*)", said)[1]) == asked
    names = ("log_prob", "old_log_prob", "advantages", "response_mask", "rollout_is_weights")
    logp, *rest, weights = (tensors[name].clone() for name in names)
    # As in verl's adapter: a row is one sequence, whose advantages may change.
    loss = policy_loss(logp.requires_grad_(), *rest, weights=weights, method=asked, layout=Rows()).loss
    expected = torch.autograd.grad(loss, logp)[0]
    torch.testing.assert_close(evaluate(actor, tensors)[1], expected, check_dtype=False)
