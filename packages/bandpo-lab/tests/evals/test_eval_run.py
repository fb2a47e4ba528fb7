import json
from collections import Counter
from typing import ClassVar

import pytest

from bandpo_lab.errors import FileProblem

pytest.importorskip("math_verify")
pytest.importorskip("filelock")

from bandpo_lab.evals.generate import Completion, GenerationError, Sampling
from bandpo_lab.evals.golds import BadGold, Gold
from bandpo_lab.evals.grading import CORES
from bandpo_lab.evals.problems import EvalProblem, embedded_problems, fingerprint, read_problems
from bandpo_lab.evals.report import as_json, as_markdown, score
from bandpo_lab.evals.run import evaluate, read_samples, regrade

PROBLEMS = [EvalProblem(f"sum-{i}", f"{i}+{i}=", str(2 * i), "sums") for i in range(4)]


class Counting:
    """Answers every problem rightly on even positions, counts what it is asked, and fails where it is told to."""

    def __init__(self, fail_after=None, error=None, sampling=None):
        self.sampling = sampling or Sampling(16)
        self.asked = Counter()
        self.fail_after, self.error = fail_after, error or GenerationError("the server is gone")

    def stream(self, prompts, missing):
        for count, position in enumerate(sorted(missing)):
            if count == self.fail_after:
                raise self.error
            self.asked[position] += 1
            a, b = prompts[position].rstrip("=").split("+")
            yield position, Completion(f"#### {int(a) + int(b) + position % 2}", "stop", 5)


def test_samples_come_back_graded_and_in_order(tmp_path):
    samples = evaluate(Counting(), PROBLEMS, 2, tmp_path / "run")
    expected = [(f"sum-{i}", j, float(j == 0)) for i in range(4) for j in range(2)]
    assert [(s.problem, s.sample, s.score) for s in samples] == expected
    assert samples[1].reason == "wrong"
    assert read_samples(tmp_path / "run") == samples


@pytest.mark.parametrize("error", [GenerationError("the server is gone"), KeyboardInterrupt()])
def test_a_run_that_stops_loses_and_repeats_nothing(tmp_path, error):
    whole = evaluate(Counting(), PROBLEMS, 3, tmp_path / "whole")
    generators = [Counting(5, error), Counting(0, error), Counting(4, error), Counting()]
    for generator in generators[:-1]:
        with pytest.raises(type(error)) as stop:
            evaluate(generator, PROBLEMS, 3, tmp_path / "run")
        kept = sum(map(len, (g.asked for g in generators)))
        said = str(stop.value)
        assert isinstance(error, KeyboardInterrupt) or f"gone; {kept} of 12 samples are kept in" in said
    assert evaluate(generators[-1], PROBLEMS, 3, tmp_path / "run") == whole
    assert sum((g.asked for g in generators), Counter()) == Counter(range(12))
    written = [(tmp_path / name / "samples.jsonl").read_text() for name in ("run", "whole")]
    assert written[0] == written[1]


def test_no_more_samples_wait_for_grading_than_there_are_graders(tmp_path):
    class Watching(Counting):
        def stream(self, prompts, missing):
            for written, answer in enumerate(super().stream(prompts, missing)):
                assert written - (tmp_path / "samples.jsonl").read_bytes().count(b"\n") <= CORES
                yield answer

    evaluate(Watching(), PROBLEMS, 2, tmp_path)


def test_a_line_cut_by_a_kill_is_drawn_again(tmp_path):
    whole = evaluate(Counting(), PROBLEMS, 2, tmp_path)
    path = tmp_path / "samples.jsonl"
    content = path.read_bytes()
    for cut in (1, 2, 40):
        path.write_bytes(content[:-cut])
        generator = Counting()
        assert evaluate(generator, PROBLEMS, 2, tmp_path) == whole
        assert list(generator.asked) == [7]
        assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 3}, "n = 2, not 3"),
        ({"problems": PROBLEMS[:3]}, "problems = 4, not 3"),
        ({"problems": [*PROBLEMS[:3], EvalProblem("sum-3", "3+4=", "7", "sums")]}, "data = "),
        ({"sampler": Counting(sampling=Sampling(16, seed=1))}, "sampling = "),
        ({"settings": {"model": "b"}}, "model = a, not b"),
    ],
)
def test_another_run_does_not_go_on_in_the_folder(tmp_path, change, message):
    call = {"sampler": Counting(), "problems": PROBLEMS, "n": 2, "settings": {"model": "a"}}
    evaluate(**call, folder=tmp_path)
    with pytest.raises(ValueError, match=message):
        evaluate(**(call | change), folder=tmp_path)


@pytest.mark.parametrize("damage", ["not json\n", '{"problem": "sum-0"}\n', None])
def test_a_damaged_file_is_refused_with_its_line(tmp_path, damage):
    evaluate(Counting(), PROBLEMS, 2, tmp_path)
    path = tmp_path / "samples.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], damage or lines[0], *lines[1:]]))
    with pytest.raises(ValueError, match="line 2"):
        evaluate(Counting(), PROBLEMS, 2, tmp_path)


def test_what_a_server_refuses_is_asked_again_and_a_run_without_samples_blocks_nothing(tmp_path):
    class Refusing(Counting):
        refused: ClassVar = {2}

        def stream(self, prompts, missing):
            for position, completion in super().stream(prompts, missing):
                gone = Completion("", "refused, 400: too long", None)
                yield position, gone if position in self.refused else completion

    with pytest.raises(GenerationError):
        evaluate(Counting(0), PROBLEMS, 1, tmp_path, settings={"model": "misspelt"})
    samples = evaluate(Refusing(), PROBLEMS, 1, tmp_path)
    assert [s.reason for s in samples] == ["right", "wrong", "no answer", "wrong"]
    assert score(samples)["sums"].endings["refused"] == 0.25
    again = Counting()
    assert [s.gold for s in evaluate(again, PROBLEMS, 1, tmp_path)] == ["0", "2", "4", "6"]
    assert list(again.asked) == [2]
    Refusing.refused = set(range(4))
    with pytest.raises(GenerationError, match="refused every request, the first refused, 400: too long"):
        evaluate(Refusing(), PROBLEMS, 1, tmp_path / "other")


def test_two_processes_do_not_write_to_one_folder(tmp_path):
    class Nested(Counting):
        def stream(self, prompts, missing):
            with pytest.raises(FileProblem, match="another process is writing"):
                evaluate(Counting(), PROBLEMS, 2, tmp_path)
            return super().stream(prompts, missing)

    assert len(evaluate(Nested(), PROBLEMS, 2, tmp_path)) == 8


def test_unfinished_runs_have_no_report(tmp_path):
    with pytest.raises(ValueError, match="n = 0"):
        evaluate(Counting(), PROBLEMS, 0, tmp_path)
    with pytest.raises(FileProblem, match="holds no evaluation"):
        read_samples(tmp_path)
    with pytest.raises(GenerationError):
        evaluate(Counting(3), PROBLEMS, 2, tmp_path)
    with pytest.raises(ValueError, match="3 samples of 8"):
        read_samples(tmp_path)


def test_the_report_by_hand(tmp_path):
    problems = [*PROBLEMS, EvalProblem("other-0", "1+1=", "3", "others")]
    scores = score(evaluate(Counting(), problems, 4, tmp_path))
    assert set(scores) == {"sums", "others"}
    sums = {name: e.value for name, e in scores["sums"].estimates().items()}
    # Two right of four for each: pass@2 misses with 1 pair of 6; two right votes against two for one wrong answer.
    expected = {"mean@4": 0.5, "pass@2": 5 / 6, "pass@4": 1.0, "maj@4": 0.5}
    assert {name: sums[name] for name in expected} == pytest.approx(expected)
    # 2 for 1 + 1 is wrong here, and 3 right.
    assert scores["others"].values["mean@4"].tolist() == [0.5]
    assert scores["sums"].endings == {
        "no answer": 0.0,
        "cut": 0.0,
        "timeout": 0.0,
        "refused": 0.0,
        "tokens": 5.0,
    }
    assert json.loads(json.dumps(as_json(scores)))["sums"]["metrics"]["pass@4"]["mean"] == 1.0
    assert "| sums | 4 | mean@4 | 0.5000 | 0.1681 to 0.8319 |" in as_markdown(scores)


@pytest.mark.usefixtures("one_grader")
def test_problems_from_prepared_files_of_both_forms(tmp_path):
    from bandpo_lab.data.prepare import prepare_data

    source = tmp_path / "held.jsonl"
    source.write_text('{"problem": "1+1?", "answer": 2.0}\n')
    prepare_data([str(source)], tmp_path / "data")
    trl = read_problems([tmp_path / "data" / "trl" / "held.parquet"])
    assert trl == read_problems([tmp_path / "data" / "verl" / "held.parquet"])
    assert (trl[0].id, trl[0].answer, trl[0].data_source) == ("held-0", "2", "held")
    assert trl[0].prompt[0]["content"].startswith("1+1?\n")


def test_files_that_cannot_be_evaluated_are_refused(tmp_path):
    raw = tmp_path / "raw.jsonl"
    raw.write_text('{"problem": "1+1?", "answer": "2"}\n')
    with pytest.raises(ValueError, match="bandpo-lab data prepare"):
        read_problems([raw])
    ready = tmp_path / "ready.jsonl"
    ready.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    assert read_problems([ready]) == [EvalProblem("ready-0", "1+1=", "2", "ready")]
    with pytest.raises(ValueError, match="id 'ready-0'"):
        read_problems([ready, ready])
    (tmp_path / "x.csv").touch()
    with pytest.raises(ValueError, match=r"must be a \.parquet or \.jsonl"):
        read_problems([tmp_path / "x.csv"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "\\ud800", "answer": "1"}', "line 2: not a JSON object, .*hex escape"),
        ('{"prompt": 5, "answer": "1"}', "row 1 .*5 is neither text nor messages of text"),
        ('{"prompt": "a", "answer": null}', "row 1 .*the answer is empty.*bandpo-lab data prepare"),
        ('{"prompt": "a", "answer": true}', "row 1 .*True is no answer"),
        ('{"prompt": "a", "reward_model": null}', "row 1 .*the answer is empty"),
    ],
)
def test_a_row_that_cannot_be_evaluated_is_named(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"x\.jsonl, {message}"):
        read_problems([path])


def test_message_parts_and_list_golds_are_read(tmp_path):
    path = tmp_path / "x.jsonl"
    prompt = [{"role": "user", "content": [{"type": "text", "text": "Roots of x^2=4?"}]}]
    path.write_text(json.dumps({"prompt": prompt, "answer": ["2", -2], "data_source": 7}) + "\n")
    (problem,) = read_problems([path])
    assert problem.prompt == [{"role": "user", "content": "Roots of x^2=4?"}]
    assert (problem.answer, problem.data_source) == ("2, -2", "7")


def test_golds_that_cannot_be_used_are_in_the_report(tmp_path):
    samples = evaluate(Counting(), PROBLEMS, 1, tmp_path)
    bad = [BadGold(Gold("sum-1", "2", "sums"), "why"), BadGold(Gold("z", "1", "others"), "other")]
    kept, dropped = score(samples, kept_golds=bad), score(samples, dropped_golds=bad)
    assert as_json(kept)["sums"]["unreadable golds"] == {"kept": {"sum-1": "why"}, "dropped": {}}
    assert "sums: 1 golds cannot be used, 1 kept" in as_markdown(kept)
    assert "0 kept (right answers may score 0 there) and 1 left out: sum-1." in as_markdown(dropped)
    assert "cannot be used" not in as_markdown(score(samples))


def test_the_fingerprint_sees_every_change():
    base = embedded_problems(3)
    assert fingerprint(base) == fingerprint(embedded_problems(3))
    assert len({fingerprint(p) for p in (base, base[:2], base[::-1], embedded_problems(3, seed=1))}) == 4


def test_settings_of_which_a_byte_has_changed_are_refused(tmp_path):
    evaluate(Counting(), PROBLEMS, 2, tmp_path)
    settings = tmp_path / "settings.json"
    content = settings.read_bytes()
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 1
        settings.write_bytes(changed)
        if changed.split() == content.split():
            continue  # a space for another
        with pytest.raises(
            ValueError, match=r"settings\.json (has changed since it was written|cannot be read)"
        ):
            regrade(tmp_path)
    settings.write_bytes(content)
    assert regrade(tmp_path) == read_samples(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_limits")
def test_hostile_answers_of_an_evaluation_have_a_limit_of_time(tmp_path, monkeypatch):
    """So many samples in a row are a batch; a right answer in a later batch has all of its time."""
    monkeypatch.setattr("bandpo_lab.evals.run.CORES", 1)
    monkeypatch.setattr("bandpo_lab.evals.run.ANSWERS_IN_A_ROW", 20)

    class Hostile(Counting):
        def stream(self, prompts, missing):
            for position in missing:
                text = rf"7^{{9^{{9^{{{position + 10}}}}}}}" if position < 20 else "0.0"
                yield position, Completion(rf"\boxed{{{text}}}", "stop", 5)

    problems = [EvalProblem("power", "?", "0", "math")]
    message = "of 22 answers had less time in the grader, as 1 others of 20 in a row met"
    with pytest.warns(UserWarning, match=f"19 {message}"):
        samples = evaluate(Hostile(), problems, 22, tmp_path / "run")
    assert [sample.score for sample in samples] == [0.0] * 20 + [1.0] * 2
    assert {sample.reason for sample in samples[:20]} <= {"timeout", "failed"}
    # The first answer's verdict is known, and takes no time.
    with pytest.warns(UserWarning, match=f"18 {message}"):
        assert [sample.score for sample in regrade(tmp_path / "run")] == [0.0] * 20 + [1.0] * 2
