"""`scripts/rehearse_recipes.py`: which recipes it rehearses, how each is composed, and what it does again."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.frameworks import needs

needs("verl")

from omegaconf import OmegaConf

import rehearse_recipes
from bandpo_lab.data import authors
from bandpo_lab.rehearsal.shrink import compose
from rehearse_recipes import CHECKED, SHIPPED, main, overrides, recipes, write_choices


def test_every_file_that_the_launcher_takes_is_a_recipe():
    some = {"paper/authors", "paper/arm/dapo", "paper/task/apps", "dapo/overlong", "paper/rule/dcpo"}
    assert some | set(CHECKED) < set(recipes())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipes())
def test_each_is_composed_with_its_own_file_in_it(recipe):
    config = OmegaConf.to_container(compose(overrides(recipe), SHIPPED, "ppo_trainer"), resolve=True)
    own = OmegaConf.to_container(OmegaConf.load(SHIPPED / f"{recipe}.yaml"))
    settings = dict(leaves(own))
    assert settings
    composed = dict(leaves(config))
    # A radius is the variant's, a name is the option's that follows; the rest is as the file says.
    told = {k: v for k, v in settings.items() if "${" not in str(v) and v != "???" and k != "recipe.radius"}
    if recipe == "paper/recommended":
        assert composed["data.train_batch_size"] == told["data.train_batch_size"]
    else:
        assert {key: composed[key] for key in told} == told


def leaves(value, key=""):
    if isinstance(value, dict):
        for name, inner in value.items():
            if name != "defaults":
                yield from leaves(inner, f"{key}.{name}".lstrip("."))
    else:
        yield key, value


def test_the_made_up_choices_are_rewarded_as_choices(tmp_path):
    import pyarrow.parquet as pq

    rows = pq.read_table(write_choices(tmp_path) / "authors/verl/commonsenseqa-train.parquet").to_pylist()
    for row in rows:
        truth, text = row["reward_model"]["ground_truth"], row["prompt"][0]["content"]
        asked, given = (int(re.search(rule, text)[1]) for rule in (r"follows (\d+)", rf"\({truth}\) (\d+)"))
        assert given == asked + 1
        assert authors.compute_score(row["data_source"], f"Answer: {truth}", truth)["score"] == 1
    assert len({row["reward_model"]["ground_truth"] for row in rows}) == 5


def test_the_table_of_the_page_is_made_of_the_results():
    table = "\n".join(rehearse_recipes.table(rehearse_recipes.committed()))
    assert table in rehearse_recipes.PAGE.read_text()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The script, with rehearsals that take no time; gives what was rehearsed and the table."""
    accepted = SimpleNamespace(ok=True, detail="accepted")
    monkeypatch.setattr(rehearse_recipes, "validate", lambda config: accepted)
    monkeypatch.setattr(rehearse_recipes, "compose", lambda *_: None)
    page, results = tmp_path / "one-card.md", tmp_path / "rehearsals.json"
    monkeypatch.setattr(rehearse_recipes, "PAGE", page)
    monkeypatch.setattr(rehearse_recipes, "RESULTS", results)
    results.write_text("{}")
    page.write_text("<!-- rehearsals: begin -->\n<!-- rehearsals: end -->\n")

    def call(*arguments, fails=""):
        done = []

        def rehearsed(chosen, **_):
            done.append(" ".join(chosen))
            ok = not fails or fails not in done[-1]
            checks = [SimpleNamespace(name="clip", ok=ok, detail="3 of 9 tokens")]
            verdict = "PASSED" if ok else "FAILED"
            return SimpleNamespace(ok=ok, verdict=verdict, checks=checks, folder=Path("/x"))

        monkeypatch.setattr(rehearse_recipes, "rehearse", rehearsed)
        monkeypatch.setattr("sys.argv", ["rehearse_recipes.py", str(tmp_path / "results"), *arguments])
        try:
            main()
        except SystemExit as stop:
            return done, page.read_text(), stop.code
        return done, page.read_text(), 0

    return call


def test_what_passed_is_not_done_again(run, capsys, tmp_path):
    done, page, code = run("paper/rule/dcpo")
    assert (len(done), code) == (1, 0)
    [row] = [line for line in page.splitlines() if line.startswith("| `")]  # the others have no result
    assert row.startswith("| `paper/rule/dcpo` | PASSED | 3 of 9 tokens |")
    whole = len(recipes()) - len(CHECKED)
    done, page, code = run(fails="grpo")
    assert (len(done), code) == (whole - 1, "failed: paper/rule/grpo")
    assert not [one for one in done if "dcpo" in one]
    assert page.count(" | PASSED | 3 of 9 tokens |  |  | 2") == whole - 1
    assert (
        f"{whole - 1} of {whole} rehearsals passed, and the settings of {len(CHECKED)} other recipes" in page
    )
    assert "| `paper/rule/grpo` | FAILED | 3 of 9 tokens |" in page
    [apps] = [line for line in page.splitlines() if line.startswith("| `paper/task/apps` |")]
    assert "not rehearsed: its reward needs a server of Sandbox Fusion |" in apps
    done, page, code = run()
    assert (len(done), code) == (1, 0)
    assert "FAILED" not in page
    assert run("--list")[0] == []
    assert "0 rehearsals and 0 checks of settings, about 0 minutes" in capsys.readouterr().out
    assert len(run("paper/rule/grpo")[0]) == 1  # named, so done again
    path = tmp_path / "rehearsals.json"
    results = json.loads(path.read_text())
    results["paper/rule/dcpo"] |= {"code": "earlier", "core": "earlier", "time": "2026-01-31T08:00+00:00"}
    path.write_text(json.dumps(results))
    done, page, _ = run("paper/rule/grpo")
    assert "| `paper/rule/dcpo` | PASSED | 3 of 9 tokens |  |  | 2026-01-31, older core |" in page
    assert len(run()[0]) == 1  # the result is another code's
    assert "older core" not in run()[1]
    assert run("paper/rule/dpco")[2] == 2
    assert "no recipe paper/rule/dpco; choose from dapo/dynamic-sampling" in capsys.readouterr().err
