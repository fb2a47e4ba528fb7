"""The table of logged keys: each name is proven by a line of the framework's code, and read in its log alone."""

import re
import subprocess

import pytest

import key_table
from rlvet.runs.keys import (
    AUDIT,
    BASES,
    FAMILIES,
    FRAMEWORKS,
    KEYS,
    OWN,
    RULE,
    Key,
    framework_of,
    pattern_of,
    table_key,
)
from rlvet.runs.logs import Log, read_log
from rlvet.runs.quantities import (
    OTHER_MODEL_KEY,
    QUANTITIES,
    component_name,
    is_of_evaluation,
    named_rows,
    source_of_row,
    sources,
)

NAMES = [row for row in KEYS if row.use in ("yes", "older") and row.framework not in (OWN, AUDIT)]
DENIED = [row for row in KEYS if row.use == "no"]


def row_id(row):
    return f"{row.framework} {row.key}"


def logged(key):
    """Return a key as it may be logged."""
    return re.sub(r"\{(?:(\d)\.\.\d|[^{}]*)\}", lambda part: part[1] or "all", key)


def test_each_row_says_where_its_key_is_written():
    for row in KEYS:
        assert row.use in ("yes", "older", "no", "ambiguous"), row
        if row.framework in (OWN, AUDIT):
            continue
        assert re.fullmatch(r"[0-9a-f]{7,10} 20\d\d-\d\d-\d\d", row.commit), row
        is_of_line = re.fullmatch(r"[\w./-]+\.py(:\d+)?", row.place) and row.source
        assert is_of_line or row.use == "older" or "until" in row.meaning, row


def test_a_key_stands_once_for_a_quantity_of_a_framework():
    rows = [(row.framework, row.key, row.quantity) for row in KEYS]
    assert len(rows) == len(set(rows))
    for framework in (*FRAMEWORKS, OWN):
        keys = [row.key for row in KEYS if row.framework == framework and row.use in ("yes", "older")]
        assert len(keys) == len(set(keys)), [key for key in keys if keys.count(key) > 1]


def test_the_frameworks_of_other_lists_are_in_the_table():
    assert {*BASES, *FAMILIES, *FAMILIES.values()} <= {*FRAMEWORKS}
    assert {base for bases in BASES.values() for base in bases} <= {*FRAMEWORKS}


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_each_quantity_has_a_name(quantity):
    assert any(source is not None and source.quantity == quantity for source in map(source_of_row, NAMES))


@pytest.mark.parametrize("row", NAMES, ids=row_id)
def test_a_name_is_read_as_its_quantity_in_the_log_of_its_framework(row):
    source = source_of_row(row)
    if source is None:
        return
    key = logged(row.key)
    for name in (key, f"tracker/{key}"):
        read = {source.key: source.quantity for source in sources(("step", name), (), row.framework)}
        # A prefix makes some keys those of an evaluation, or like those of another model.
        if name != key and (is_of_evaluation(name) or OTHER_MODEL_KEY.search(name)):
            continue
        assert read.get(name) == source.quantity


@pytest.mark.parametrize("row", DENIED, ids=row_id)
def test_a_denied_key_is_read_as_nothing_in_the_log_of_its_framework(row):
    key = logged(row.key)
    for name in (key, f"tracker/{key}"):
        read = [
            source for source in sources(("step", name), (), row.framework) if source.quantity != "evaluation"
        ]
        assert read == [], name
    if framework_of(frozenset((key,))) == row.framework:
        (named,) = named_rows([{"step": 1, "@": 0.0, key: 0.25}])
        assert set(named) & set(QUANTITIES) == set()


@pytest.mark.parametrize("row", [row for row in NAMES if row.placeholder], ids=row_id)
def test_a_series_of_placeholders_is_unmeasured(row):
    source = source_of_row(row)
    if source is None:
        return
    of_framework = [other for other in NAMES if other.framework == row.framework]
    keys = [logged(other.key) for other in of_framework if other.quantity != row.quantity]
    key = logged(row.key)
    for values in ((0.0, 0.0, 0.0), (0.0, 0.0, 0.25)):
        rows = [{"step": step, key: value} for step, value in enumerate(values, 1)]
        marked = [{**dict.fromkeys(keys, 0.5), **logged_row} for logged_row in rows]
        log = Log.of(marked)
        if framework_of(frozenset(marked[0])) != row.framework:
            continue
        notes = [note for note in log.notes if note.startswith(f"{key} is 0 in every row")]
        assert len(notes) == (values[-1] == 0.0)


@pytest.mark.parametrize(
    "framework", [name for name in FRAMEWORKS if name not in ("trl-rloo", "axolotl", "miles", "trlx")]
)
def test_a_framework_is_recognised_by_its_keys(framework):
    keys = frozenset(logged(row.key) for row in KEYS if row.framework == framework and row.quantity != RULE)
    assert framework_of(keys) == framework


@pytest.mark.parametrize(
    ("keys", "framework"),
    [
        (("reward", "kl", "entropy"), ""),
        (("step", "loss", "learning_rate", "grad_norm"), ""),
        (("my/own", "avg_reward"), ""),
        (("reward", "kl", "completions/mean_length", "clip_ratio/region_mean"), "trl"),
        (("reward", "kl", "ratio", "entropy", "completions/mean_length"), "trl-async"),
        (("train/reward", "train/kl", "train/actor_lr", "train/ppo_clip_ratio"), "openrlhf"),
        (("reward", "learning_rate", "rollout_corr/kl"), "verl"),
    ],
)
def test_frameworks_of_few_keys(keys, framework):
    assert framework_of(frozenset(keys)) == framework


def test_patterns_of_keys():
    assert table_key("train/agg/all/main/reward/mean") == "train/agg/all/{agent}/reward/mean"
    assert table_key("train/agg/all/a/b/reward/mean") is None
    assert pattern_of("a.b").fullmatch("a.b")
    assert not pattern_of("a.b").fullmatch("acb")


def commit(folder, text):
    """Commit a file in a repository."""
    (folder / "trainer.py").write_text(text)
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", "a")):
        subprocess.run(["git", "-C", str(folder), *command], check=True)


def test_lines_are_found_again_by_their_text(tmp_path):
    folder = tmp_path / "clone"
    folder.mkdir()
    commit(folder, 'import time\n\nlog["reward"] = mean\n')
    clone = key_table.Clone(folder, "")
    row = Key(
        "toy", "reward", "reward", "yes", "", "", "", "abc 2026-01-01", "old.py:9", 'log["reward"] = mean'
    )
    other = row._replace(key="kl", source='log["kl"] = kl')
    older = row._replace(key="old", source="", use="older")
    rows, gone = key_table.found_again([row, other, older], {"toy": clone})
    assert rows == [row._replace(place="trainer.py:3", commit=clone.commit), other, older]
    assert gone == [other]
    assert re.fullmatch(r"[0-9a-f]{7,10} 20\d\d-\d\d-\d\d", clone.commit)


def test_the_job_writes_the_table_as_it_is():
    assert key_table.text_of(KEYS) == key_table.TABLE.read_text()
    assert {*key_table.REPOSITORIES} == {*FRAMEWORKS}


WRONG = {
    "AReaL: as long as the longest of the batch, not cut off": (
        {"ppo_actor/no_eos_ratios/avg": 0.5, "ppo_actor/update/entropy/avg": 0.5},
        {"entropy": 0.5},
    ),
    "prime-rl: one environment is not the run": (
        {
            "train/easy/all/policy/reward/mean": 0.95,
            "train/agg/all/policy/reward/mean": 0.5,
            "train/agg/effective/policy/reward/mean": 0.7,
        },
        {"reward": 0.5},
    ),
    "TRL's asynchronous trainer: KL to the policy that sampled": (
        {"reward": 0.5, "kl": 0.6, "ratio": 1.0, "completions/mean_length": 300.0},
        {"reward": 0.5, "kl_old": 0.6, "importance_weight": 1.0, "length": 300.0},
    ),
    "torchtitan: signed": (
        {"rollout_reward/_mean": 0.5, "bit_wise/logprob_diff/mean": -0.4},
        {"reward": 0.5, "mismatch_kl": 0.4},
    ),
    "slime: normalised by group": (
        {"rollout/raw_reward": 0.4, "rollout/rewards": 1e-9, "train/ppo_kl": 0.1},
        {"reward": 0.4, "kl_old": 0.1},
    ),
    "slime without the raw reward": (
        {"rollout/rewards": 1e-9, "train/ppo_kl": 0.1},
        {"kl_old": 0.1},
    ),
    "NeMo-RL: the trainer against the engine": (
        {"train/reward": 0.5, "train/policy_kl_error": 0.2, "train/mean_gen_tokens_per_sample": 9.0},
        {"reward": 0.5, "mismatch_kl": 0.2, "length": 9.0},
    ),
    "NeMo-RL: the prompts that dynamic sampling kept": (
        {"train/reward": 0.5, "train/filtered_reward": 0.7, "train/gen_kl_error": 0.2},
        {"reward": 0.5, "mismatch_kl": 0.2},
    ),
    "ROLL: a count": (
        {"rollout/score/mean": 0.5, "token/total_response_length/clip": 5.0, "actor/clipfrac": 0.1},
        {"reward": 0.5, "clip": 0.1},
    ),
    "ROLL: ratios outside, whatever the sign of the advantage": (
        {"rollout/score/mean": 0.5, "actor/ppo_ratio_clipfrac": 0.4, "actor/ppo_ratio_high_clipfrac": 0.4},
        {"reward": 0.5},
    ),
    "tunix: the reward, no component": (
        {"rewards/score/mean": 0.5, "pg_clipfrac": 0.1, "entropy": 0.5, "completions/mean_length": 9.0},
        {"reward": 0.5, "clip": 0.1, "entropy": 0.5, "length": 9.0},
    ),
    "open-instruct: no KL": (
        {"scores": 0.5, "objective/kl2_avg": 0.0, "val/stop_rate": 1.0},
        {"reward": 0.5, "cut": 0.0},
    ),
    "OpenRLHF: no reference": (
        {"train/reward": 0.5, "train/kl": 0.0, "train/actor_lr": 1e-6, "train/ppo_clip_ratio": 0.1},
        {"reward": 0.5, "learning_rate": 1e-6, "clip": 0.1},
    ),
    "SkyRL's Megatron: no KL loss": (
        {"reward/avg_raw_reward": 0.5, "policy/policy_kl": 0.0, "policy/policy_entropy": 0.5},
        {"reward": 0.5, "entropy": 0.5},
    ),
    "open-instruct: weighted by the probability twice": (
        {"scores": 0.5, "debug/vllm_local_reverse_kl": 0.3, "val/rho_weight": 0.9},
        {"reward": 0.5, "importance_weight": 0.9},
    ),
}
"""Keys that were read as other quantities, with what is read now."""


@pytest.mark.parametrize("case", WRONG)
def test_what_was_read_as_another_quantity(case):
    metrics, expected = WRONG[case]
    log = Log.of([{"step": step, **metrics} for step in range(1, 4)])
    row = log.rows[-1]
    assert {name: row[name] for name in QUANTITIES if name in row} == pytest.approx(expected)
    assert {name for name in log.read if name in QUANTITIES} == set(expected)
    named = {*log.unread, *log.counters, *log.replaced, *(key for keys in log.read.values() for key in keys)}
    assert named >= set(metrics)


def test_rows_of_an_evaluation_are_none_of_training(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = []
    for update in range(12):
        lines.append(
            f'{{"type": "train", "update": {update}, "judge_reward_mean": 0.25, "clip_fraction": 0.1}}'
        )
        lines.append(f'{{"type": "eval", "update": {update}, "judge_reward_mean": 0.75}}')
    file.write_text("\n".join(lines))
    log = read_log(file)
    assert (len(log.rows), log.rows[3]["reward"], log.rows[3]["evaluation"]) == (12, 0.25, 0.75)


def test_of_two_rewards_of_one_s_own_none_is_the_reward():
    rows = [{"step": 1, "judge_reward_mean": 0.25, "form_reward_mean": 0.5}]
    assert "reward" not in Log.of(rows).read
    assert component_name("rewards/format/mean") == "format"
