"""`bandpo audit` opens with what rules drop of the gradient on rare winners, in sentences and words."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("rlvet")

from bandpo.audit import Recorder
from bandpo.cli.app import app
from bandpo.replay.record_audit import NO_IDS, NO_TOKENIZER
from bandpo.replay.tables import dropped_by
from rlvet.cli.app import app as rlvet_app
from rlvet.runs.effect import Effect, matter_line

pytest.importorskip("pyarrow")

ROWS = 40


def record(folder, p=0.05, ratio=2.0, ids=True, anchor="trainer", method="FixedClip(0.2)", rows=ROWS):
    """Write a record of answers of three tokens, whose second has a probability, a ratio and an advantage of 1."""
    logp_old = torch.tensor([[0.5, p, 0.05]]).log().repeat(rows, 1)
    logp = logp_old + torch.tensor([[1.0, ratio, 1.0]]).log()
    with Recorder(folder, method=method, anchor=anchor) as recorder:
        recorder.add(
            logp=logp,
            logp_old=logp_old,
            logp_rollout=logp_old,
            advantages=torch.ones(rows),
            tokens=torch.tensor([[0, 1, 2]]).repeat(rows, 1) if ids else None,
            step=1,
        )
    return folder


def tokenizer(folder, words):
    tokenizers = pytest.importorskip("tokenizers")
    folder.mkdir(parents=True, exist_ok=True)
    model = tokenizers.models.WordLevel({word: k for k, word in enumerate(words)}, unk_token=words[0])
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))


def audit(*arguments, width=200):
    result = CliRunner().invoke(app, ["audit", *map(str, arguments)], env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_audit_opens_with_the_sentence_then_kinds_then_tokens_then_the_table(tmp_path):
    tokenizer(tmp_path, ["Yes", "12", "."])
    output = audit(record(tmp_path))
    lines = [
        # Each of 40 tokens has 2 of a gradient of 3 on rare winners, and 40 of 120 tokens are common.
        "of the gradient on 80 rare winners (p < 0.1, A > 0) the run dropped 67 % (much), clip 0.2 would have dropped "
        "67 % (much), Clip-Higher 67 % (much), DCPO 0 % (little), Band 0 % (little)",
        "rare winners have 75 % of the gradient on all winners (A > 0), and 100 % of the part that the run dropped",
        "a clip can matter here",
        "of the rare winners' gradient that the run dropped, 100 % was on numbers",
        "the tokens of whose gradient the run dropped most",
        "│ Yes ⟦12⟧ . │",
        "rare winners by kind",
        "bounds around the trainer's policy",
    ]
    places = [output.index(line) for line in lines]
    assert places == sorted(places)
    assert "│ 1    │ 0.05 │ 2     │ +1 │ the run, clip 0.2, Clip-Higher │" in output
    assert NO_TOKENIZER not in output


def test_without_a_tokenizer_ids_are_shown_and_it_is_said_once(tmp_path):
    output = audit(record(tmp_path))
    assert output.count(NO_TOKENIZER) == 1
    assert output.count("tokenizer") == 3  # in this sentence
    assert "│ 0 ⟦1⟧ 2 │" in output
    assert "100 % was on other tokens" in output


def test_a_tokenizer_of_the_run_that_cannot_be_read_is_no_error(tmp_path):
    folder = record(tmp_path)
    (folder / "tokenizer.json").write_text("no tokenizer")
    pytest.importorskip("tokenizers")
    output = audit(folder)
    assert "tokens are shown as ids: " in output
    assert "│ 0 ⟦1⟧ 2 │" in output


def test_the_user_names_a_tokenizer(tmp_path):
    tokenizer(tmp_path / "mine", ["Yes", "12", "."])
    output = audit(record(tmp_path / "tokens"), "--tokenizer", tmp_path / "mine")
    assert "│ Yes ⟦12⟧ . │" in output


def test_without_ids_no_token_is_shown_and_it_is_said(tmp_path):
    output = audit(record(tmp_path, ids=False))
    assert NO_IDS in output
    assert "⟦" not in output
    assert "by kind" not in output
    assert "the run dropped 67 % (much)" in output


def test_another_anchor_is_said_before_the_sentence(tmp_path):
    output = audit(record(tmp_path, anchor="rollout"))
    assert output.index("(anchor: rollout)") < output.index("of the gradient on 80 rare winners")
    assert "anchor: rollout" not in audit(record(tmp_path / "trainers"))


def test_of_a_rule_that_drops_nothing_the_tokens_of_the_first_other_rule_are_shown(tmp_path):
    output = audit(record(tmp_path, method="Band()"))
    assert "the run dropped 0 % (little), clip 0.2 would have dropped 67 % (much)" in output
    assert "gradient that the run dropped" not in output
    assert (
        "of the rare winners' gradient that clip 0.2 would have dropped, 100 % was on other tokens" in output
    )
    assert "the tokens of whose gradient clip 0.2 would have dropped most" in output
    assert "│ clip 0.2, Clip-Higher │" in output


def test_how_much_of_what_a_rule_drops_is_rare_is_said(tmp_path):
    """Thirty tokens each of the probabilities 0.05, 0.4 and 0.8, whose ratios are 2, 1.25 and 1.1."""
    p = torch.tensor([[0.05, 0.4, 0.8]]).expand(30, -1)
    logp = (p * torch.tensor([[2.0, 1.25, 1.1]])).log()
    with Recorder(tmp_path, method="BandAbove()") as recorder:
        recorder.add(logp=logp, logp_old=p.log(), advantages=torch.ones(30), step=1)
    share = (
        "46 % of the gradient on all winners (A > 0), and 62 % of the part that clip 0.2 would have dropped"
    )
    assert f"rare winners have {share}\n" in audit(tmp_path)


def record_of_two_kinds(folder, method="FixedClip(0.0, 0.6)", rows=ROWS):
    """Write a record of answers with a token that clips of 0.6 and of 0.2 drop, and one that 0.2 alone drops."""
    logp_old = torch.full((rows, 2), 0.05).log()
    logp_old -= torch.arange(rows)[:, None] / 1000
    with Recorder(folder, method=method) as recorder:
        recorder.add(
            logp=logp_old + torch.tensor([[2.0, 1.5]]).log(),
            logp_old=logp_old,
            advantages=torch.ones(rows),
            tokens=torch.tensor([[1, 2]]).repeat(rows, 1) + torch.arange(rows)[:, None] * 10,
            step=1,
        )
    return folder


def listed(output):
    """Return the token and the rules of each row of the list of tokens."""
    rows = re.findall(r"│[^│\n]*⟦(\d+)⟧.*│ ([^│]*?) *│\n", output)
    return [(int(word) % 10, rules) for word, rules in rows]


def test_the_list_has_both_what_the_run_drops_and_what_clip_02_alone_would_drop(tmp_path):
    output = audit(record_of_two_kinds(tmp_path))
    assert (
        "the tokens of whose gradient the run dropped most (5 of 40), then those that clip 0.2 would have dropped and "
        "the run kept (5 of 40; in all, clip 0.2 would have dropped 80), of either sign of A; equal answers of a batch"
        in " ".join(output.split())
    )
    assert listed(output) == 5 * [(1, "the run, clip 0.2, Clip-Higher")] + 5 * [(2, "clip 0.2, Clip-Higher")]


def test_equal_answers_and_updates_have_a_row_which_the_title_says(tmp_path):
    """Forty equal answers in two updates: the clip drops their second token eighty times."""
    logp_old = torch.tensor([[0.5, 0.05, 0.5]]).log().repeat(ROWS, 1)
    with Recorder(tmp_path, method="FixedClip(0.2)") as recorder:
        for update in range(2):
            recorder.add(
                logp=logp_old + torch.tensor([[1.0, 2.0, 1.0]]).log(),
                logp_old=logp_old,
                advantages=torch.ones(ROWS),
                tokens=torch.tensor([[10, 11, 12]]).repeat(ROWS, 1),
                step=1,
                update=update,
            )
    output = audit(tmp_path)
    assert listed(output) == [(1, "the run, clip 0.2, Clip-Higher")]
    assert (
        "the tokens of whose gradient the run dropped most (1 of 80), of either sign of A; equal answers of a batch, "
        "and several updates on it, share a row" in " ".join(output.split())
    )


def test_a_list_of_few_is_filled_with_the_other_kind(tmp_path):
    output = audit(record_of_two_kinds(tmp_path, rows=3))
    assert listed(output) == 3 * [(1, "the run, clip 0.2, Clip-Higher")] + 3 * [(2, "clip 0.2, Clip-Higher")]
    assert len(listed(audit(record_of_two_kinds(tmp_path / "same", "FixedClip(0.2)")))) == 10


def test_the_list_compares_with_the_first_rule_that_is_named(tmp_path):
    output = audit(record_of_two_kinds(tmp_path), "--method", "FixedClip(0.0, 0.8)")
    assert "those that" not in output
    assert listed(output) == 10 * [(1, "the run, FixedClip(0.0, 0.8), clip 0.2")]


@pytest.mark.parametrize("p", [0.05, 0.5])
@pytest.mark.parametrize("method", ["Band()", "FixedClip(0.2)", None])
def test_the_verdict_does_not_depend_on_the_rules_that_are_named(tmp_path, p, method):
    folder = record(tmp_path, p=p, method=method)
    verdicts = set()
    for named in ([], ["FixedClip(0.2)"], ["GRPO()"], ["FixedClip(0.2, 1.0)"], ["GSPO()", "Band()"]):
        output = audit(folder, *(word for name in named for word in ("--method", name)))
        verdicts.add(re.search(r"^(?:no|a) clip can matter[^:;]*", output, re.M)[0])
    assert len(verdicts) == 1


@pytest.mark.parametrize(
    ("kept", "shown"),
    [
        ({"a": 1.0, "b": 1.0000001}, "–"),
        ({"a": 0.0, "b": -0.5, "c": 2.0}, "a, b"),
        ({"a": 0.25, "b": 0.996}, "a (75 %)"),
        ({"a": 0.001, "b": 0.99}, "a, b (1 %)"),
    ],
)
def test_rules_are_named_with_the_share_that_they_drop(kept, shown):
    assert dropped_by(kept) == shown


def test_no_clip_can_matter_where_no_rule_drops_a_hundredth(tmp_path):
    output = audit(record(tmp_path, ratio=1.1))
    assert "no clip can matter here: each rule drops less than 1 % (mean abs(log r) 0.032)" in output
    assert "a clip can matter" not in output


def rates(blocked=0.0, low=0.0):
    return {"clip_high": 0.0, "clip_low": low, "blocked_mass_below_0.1": blocked}


@pytest.mark.parametrize(
    ("run", "strict", "beginning"),
    [
        (
            rates(),
            rates(low=0.02),
            "a clip can matter little here: each rule drops less than 5 % (clip 0.2 would have blocked 2.0 % of all "
            "tokens; docs/audit.md)",
        ),
        (rates(), rates(blocked=0.02), "a clip can matter little here"),
        (rates(blocked=0.02), rates(), "a clip can matter little here"),
        (rates(), rates(0.049, 0.049), "a clip can matter little here"),
        (
            rates(),
            rates(0.69),
            "a clip can matter here, as clip 0.2 would have dropped 69 % of the gradient on rare winners; the size",
        ),
        (
            rates(),
            rates(low=0.05),
            "a clip can matter here, as clip 0.2 would have blocked 5.0 % of all tokens; the",
        ),
        (
            rates(0.05),
            rates(),
            "a clip can matter here, as the run dropped 5.0 % of the gradient on rare winners; ",
        ),
        (rates(), rates(0.009, 0.009), "no clip can matter here: each rule drops less than 1 %"),
    ],
)
def test_what_is_said_of_whether_a_clip_can_matter(run, strict, beginning):
    """Also if only losers are blocked."""
    assert matter_line({"the run": run, "clip 0.2": strict}).startswith(beginning)


def test_a_wide_rule_that_drops_little_says_nothing_of_a_strict_one():
    assert matter_line({"the run": rates()}) == ""
    assert matter_line({"the run": rates(0.02)}).startswith("a clip can matter here")
    line = matter_line({"the run": rates(low=0.0136), "Band": {"blocked_mass_below_0.1": 0.0}})
    assert line.startswith(
        "a clip can matter here, as the run blocked 1.4 % of all tokens; the size of these"
    )
    assert matter_line({"the run": {"tokens": 3.0}}) == matter_line({}) == ""


@pytest.mark.parametrize(
    ("counts", "beginning"),
    [
        ({"tokens": 500, "tokens_positive_below_0.1": 29}, "no clip can matter here"),
        ({"tokens": 500, "tokens_positive_below_0.1": 30}, "a clip can matter here"),
        ({"tokens": 29, "tokens_positive_below_0.1": 3}, ""),
    ],
)
def test_what_a_rule_drops_of_few_rare_winners_does_not_tell_whether_a_clip_can_matter(counts, beginning):
    line = matter_line({"the run": rates(0.5) | counts, "clip 0.2": rates(0.5) | counts})
    assert line.startswith(beginning)
    assert bool(line) == bool(beginning)


def test_of_few_tokens_the_tables_have_numbers_and_no_shares(tmp_path):
    """Seven answers of three tokens: nothing is said in per cent."""
    output = audit(record(tmp_path, rows=7))
    assert "%" not in output
    assert "7 of 14" in output


def test_of_few_rare_winners_no_share_is_said(tmp_path):
    output = audit(record(tmp_path, rows=7))
    assert "14 rare winners (p < 0.1, A > 0): too few to say" in output
    assert "would have dropped" not in output
    assert "│ 0 ⟦1⟧ 2 │" in output


def test_a_rule_of_an_unknown_run_is_not_said_to_have_dropped_anything(tmp_path):
    output = audit(record(tmp_path, method=None))
    assert "(p < 0.1, A > 0) clip 0.2 would have dropped 67 % (much), Clip-Higher 67 % (much)" in output
    assert "the run dropped" not in output


def run_method(command, path, method):
    """Return the error of a command that is told the method of a run; empty if it ends without one."""
    commands = app if command == "audit" else rlvet_app
    result = CliRunner().invoke(commands, [command, str(path), "--run-method", method])
    return "" if isinstance(result.exception, SystemExit | None) else str(result.exception)


@pytest.mark.parametrize("command", ["audit", "diagnose", "report"])
def test_a_method_of_the_run_is_refused_for_a_record_that_names_another(tmp_path, command):
    folder = record(tmp_path / "named")
    message = run_method(command, folder, "GSPO(0.1)")
    assert f"{folder} names its method, FixedClip(low=0.2, high=0.2), so --run-method " in message
    assert "leave it out, or compare it by `bandpo audit --method` on a record" in message
    assert run_method(command, folder, "FixedClip(0.2)") == ""
    assert run_method(command, record(tmp_path / "unnamed", method=None), "GSPO(0.1)") == ""


@pytest.mark.parametrize("command", ["diagnose", "report"])
def test_a_method_of_the_run_is_refused_for_a_log_whose_configuration_names_another(tmp_path, command):
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(json.dumps({"step": step, "reward": 0.01 * step}) for step in range(30)))
    assert run_method(command, log, "GSPO(0.1)") == ""
    settings = "loss_fn: {ratio_clip_min: 0.2, ratio_clip_max: 0.28, ratio_clip_c: null}"
    (tmp_path / "config.yaml").write_text(settings)
    message = run_method(command, log, "GSPO(0.1)")
    assert f"{log} names its method, FixedClip(low=0.2, high=0.28), so --run-method " in message
    assert run_method(command, log, "FixedClip(0.2, 0.28)") == ""


def test_a_method_is_compared_with_that_of_a_record(tmp_path):
    assert "GSPO(0.1) would have dropped" in audit(record(tmp_path / "named"), "--method", "GSPO(0.1)")
    assert "the run dropped" in audit(record(tmp_path / "unnamed", method=None), "--run-method", "GSPO(0.1)")


HOSTILE = ["\x1b]0;mine\x07\u202e", "</script><img src=x onerror=alert(1)>", "[bold]\u2066" + "a" * 5000]


def test_tokens_are_no_commands_of_the_terminal_or_of_a_page(tmp_path):
    tokenizer(tmp_path, HOSTILE)
    output = audit(record(tmp_path), width=400)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", output)
    assert r"\x1b]0;mine\x07\u202e ⟦</script><img src=x onerror=alert(1)>⟧ [bold]\u2066aaaa" in output
    assert "a" * 100 not in output
    text = json.loads(audit(tmp_path, "--json"))[str(tmp_path)]["tokens"][0]["text"]
    assert text[0] == r"\x1b]0;mine\x07\u202e"
    assert len(text[2]) < 100


def test_the_record_in_the_folder_of_a_run_is_audited(tmp_path):
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "reward": 0.5}]}))
    tokenizer(tmp_path, ["Yes", "12", "."])
    record(tmp_path / "tokens")
    output = audit(tmp_path)
    assert output.startswith(f"{tmp_path}, 1 steps, 120 tokens")
    assert "│ Yes ⟦12⟧ . │" in output


def test_of_a_run_whose_record_has_no_policy_in_training_the_log_is_audited(tmp_path):
    """As of verl, which records batches before their first loss."""
    metrics = {"tokens": 900, "tokens_positive_below_0.1": 120, "blocked_mass_below_0.1": 0.3}
    metrics["mass_positive_below_0.1"] = 9.0
    row = {"step": 1, "reward": 0.5, **{f"audit/{name}": value for name, value in metrics.items()}}
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [row]}))
    with Recorder(tmp_path / "tokens", method="FixedClip(0.2)") as recorder:
        recorder.add(logp_old=torch.full((1, 2), -1.0), advantages=torch.ones(1), step=1)
    assert "the run dropped 30 % (much)" in audit(tmp_path)
    result = CliRunner().invoke(app, ["audit", str(tmp_path / "tokens")])
    assert "give the log" in str(result.exception)


def test_the_json_has_the_sentences_the_kinds_and_the_tokens(tmp_path):
    tokenizer(tmp_path, ["Yes", "12", "."])
    result = json.loads(audit(record(tmp_path), "--json"))[str(tmp_path)]
    assert result["lines"][0].startswith("of the gradient on 80 rare winners")
    assert list(result["methods"]) == ["the run", "clip 0.2", "Clip-Higher", "DCPO", "Band"]
    [numbers, signs] = result["kinds"]
    assert (numbers["kind"], numbers["tokens"]) == ("numbers", ROWS)
    assert numbers["dropped"]["the run"] == pytest.approx(1, abs=1e-6)
    assert signs["of_dropped"]["the run"] == 0
    assert result["tokens"][0]["text"] == ["Yes", "12", "."]
    assert result["tokens"][0]["kept"]["Band"] == 1


def test_a_log_opens_with_the_sentence_of_its_metrics(tmp_path):
    metrics = {
        "tokens": 900,
        "tokens_positive_below_0.1": 120,
        "mass_positive_below_0.1": 100.0,
        "blocked_mass_below_0.1": 0.3,
        "if/Band/blocked_mass_below_0.1": 0.02,
    }
    row = {"step": 1, "reward": 0.5, **{f"audit/{name}": value for name, value in metrics.items()}}
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [row]}))
    output = audit(tmp_path)
    assert (
        "of the gradient on 120 rare winners (p < 0.1, A > 0) the run dropped 30 % (much), Band would have dropped "
        "2 % (little)" in output
    )
    assert "is a log: record the tokens (docs/audit.md) to see which ones a rule drops" in output


def test_a_log_without_the_number_of_rare_winners_has_no_sentence():
    assert Effect.from_log({"blocked_mass_below_0.1": 0.3}).lines == []
    assert Effect.from_log({}).lines == []
