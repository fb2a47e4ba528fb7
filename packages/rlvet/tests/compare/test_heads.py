"""What two outputs printed before their first row is told where no settings of them are known."""

import pytest

from rlvet.compare import diff
from rlvet.compare.heads import Head, differing_pairs

ROWS = "".join(
    f"{{'loss': 0.1, 'reward': {0.2 + 0.005 * step}, 'kl': 0.{step:03}, 'step': {step}}}\n"
    for step in range(1, 60)
)


def output(path, head, rows=ROWS):
    path.write_text(head + rows)
    return path


@pytest.mark.parametrize(
    ("head", "pairs"),
    [
        ("=== rho5.00_seed42  GPU=0  MASTER_PORT=29546  START=Sat Apr  4 08:45:11 PM UTC 2026 ===\n", {}),
        ("INFO train: rho=5.00, seed=42\n", {"rho": "5.00", "seed": "42"}),
        (
            "  Num examples = 7,473\n  Total train batch size (w. parallel, distributed & accumulation) = 4\n",
            {
                "Num examples": "7,473",
                "Total train batch size (w. parallel, distributed & accumulation)": "4",
            },
        ),
        ("adq: False | beta: 1e-3\n", {"adq": "False", "beta": "1e-3"}),
        ("lam=0.1\nlam=0.2\nmu=3\n", {"mu": "3"}),
        ("max_steps=200 step: 3 total=7\n", {"max_steps": "200"}),
        (
            "csd_pilot: rho=1.00, G=cfg, dataset=gsm8k, output_dir=out/run_3 ===\n",
            {"rho": "1.00", "G": "cfg", "dataset": "gsm8k"},
        ),
        (
            "Namespace(model='Qwen/Qwen2.5-7B', lr=1e-05, reward_type=\"exact\", use_vllm=True, out='/a/b')\n",
            {"model": "Qwen/Qwen2.5-7B", "lr": "1e-05", "reward_type": "exact", "use_vllm": "True"},
        ),
        (
            "args: model_name='Qwen/Qwen2.5-7B', exp_name='a1', run_name=b2, wandb_project=c\n",
            {"model_name": "Qwen/Qwen2.5-7B", "wandb_project": "c"},
        ),
        (
            "[RewardManager] reward config: {'lam': 0.05, 'variant': 'conditional', 'norm': 384.0} | score=robust\n",
            {
                "reward config: lam": "0.05",
                "reward config: variant": "conditional",
                "reward config: norm": "384.0",
                "score": "robust",
            },
        ),
        ("Model: Qwen/Qwen2.5-7B-Instruct\nNote: this is prose\n", {"Model": "Qwen/Qwen2.5-7B-Instruct"}),
        (
            "Starting training:\n  Difficulty: easy\n  Dataset size: 4695\n  scale_rewards setting: False\n",
            {"Difficulty": "easy", "Dataset size": "4695", "scale_rewards setting": "False"},
        ),
        (
            "- Learning rate (peak): 1e-05\nLog file: 3\nAll parameters: 1562179072\n",
            {"Learning rate (peak)": "1e-05", "All parameters": "1562179072"},
        ),
        ("Loading data: please wait\nWe found in this folder these numbers: 3\n", {}),
        ("x = list(map(f, key=len(y))); a==b url=https://a/b\n", {}),
        ("2026-04-19 08:16:38,967 at 10.0.0.1:8080 /a/b=3/c\n", {}),
        (
            "Loading data: /a/b.jsonl\n  Using first 15,000 examples (--max-samples)\n  15,000 training examples\n",
            {"examples": "15,000", "training examples": "15,000"},
        ),
        ("Loaded 7473 training prompts from gsm8k in 12 seconds, v1.2 tasks\n", {"training prompts": "7473"}),
        (
            "Trainable params: 18,464,768 / 1,562,179,072\nshape=1,2 at worker.py:2003\n",
            {"params": "18,464,768"},
        ),
        ("You should set the `fix_mistral_regex=True` flag\nset `beta=3` to keep it\n", {}),
        (
            "env: {'HF_TOKEN': 'hf_abcdef', 'API_KEY': 'sk-1', 'max_token': 512, 'password': 'None', 'tau': 0.1}\n",
            {"env: max_token": "512", "env: password": "None", "env: tau": "0.1"},
        ),
        ("ckpt_to_keep: 2\nmax_ckpt: 3\n", {}),
        ("non-default args: {'seed': 3}\n", {"non-default args: seed": "3"}),
        ("\x1b[36m(TaskRunner pid=7)\x1b[0m n: 16\n", {"n": "16"}),
    ],
)
def test_pairs_of_a_name_and_a_value_are_found(head, pairs, tmp_path):
    found = Head(output(tmp_path / "run.log", head)).pairs
    assert {name: next(iter(values)) for name, values in found.items() if len(values) == 1} == pairs


def test_what_follows_the_first_row_is_not_looked_at(tmp_path):
    assert Head(output(tmp_path / "run.log", "seed=1\n", ROWS + "rho=2\n")).pairs == {"seed": {"1"}}


def test_a_file_of_another_kind_has_no_pairs(tmp_path):
    file = output(tmp_path / "metrics.jsonl", "seed=1\n")
    assert Head(file).pairs == {}
    assert differing_pairs(Head(file), Head(output(tmp_path / "run.log", "seed=2\n"))) == {}


def test_pairs_that_differ_are_told_beside_settings_that_are_not_known(tmp_path):
    a = output(tmp_path / "a.log", "seed=42 rho=0.70 lr=1e-6 only_a=3\n")
    b = output(tmp_path / "b.log", "seed=43 rho=0.10 lr=1e-6\n")
    said = str(diff(a, b))
    assert (
        "\nprinted before training, not judged, and maybe changed since: (A | B) seed 42 | 43, rho 0.70 | 0.10; "
        "only A prints only_a 3\n" in said
    )
    said = str(diff(a, a))
    assert "maybe changed since" not in said
    assert diff(a, b).headline.endswith("; printed before training with other values: seed, rho")
    assert (
        "; of what is printed before training, these are equal: seed 42, rho 0.70, lr 1e-6, only_a 3; nothing"
        in said
    )


def test_the_error_of_an_output_is_told_below_its_path(tmp_path):
    a = output(tmp_path / "a.log", "seed=42\n")
    error = "Traceback (most recent call last):\n  File 'a.py', line 1\nOSError: No space left on device\n"
    b = output(tmp_path / "b.log", "seed=43\n", ROWS + error)
    said = str(diff(a, b))
    assert said.count("the output has an error: ") == 1
    assert "   after its last row, the output has an error: 'OSError: No space left on device'\n" in said
    assert said.index("B: ") < said.index("the output has")


def test_of_a_name_with_several_values_the_one_that_differs_is_told(tmp_path):
    a = output(tmp_path / "a.log", "lam=1.0\nreward config: {'lam': 0.05, 'norm': 384}\nshard: 1\nshard: 2\n")
    b = output(
        tmp_path / "b.log",
        "lam=1.0\nreward config: {'lam': 0.1, 'norm': 384}\nshard: 1\nshard: 3\nshard: 4\n",
    )
    assert differing_pairs(Head(a), Head(b)) == {"reward config: lam": "0.05 | 0.1"}


def test_one_setting_that_is_printed_twice_is_told_once(tmp_path):
    a = output(tmp_path / "a.log", "Namespace(normalization='std', seed=1)\nNormalization: std\nSeed: 1\n")
    b = output(tmp_path / "b.log", "Namespace(normalization='none', seed=2)\nNormalization: none\nSeed: 3\n")
    assert differing_pairs(Head(a), Head(b)) == {
        "seed": "1 | 2",
        "normalization": "std | none",
        "Seed": "1 | 3",
    }


def test_a_name_that_stands_in_another_line_is_not_of_one_output_alone(tmp_path):
    a = output(tmp_path / "a.log", "temperature: 0.7\nseed: 1\n" + "Part is read\n" * 500)
    b = output(tmp_path / "b.log", "seed: 1\n" + "Part is read\n" * 500 + " 'temperature': f(0.7),\n")
    assert "only A prints" not in str(diff(a, b))


def test_words_that_one_of_two_like_outputs_prints_are_told(tmp_path):
    head = "seed: 42\nLoading model: /m/x\n"
    a = output(tmp_path / "a.log", f"{head}  flash-attn not found, using default attention\n")
    b = output(tmp_path / "b.log", f"{head}  Using Flash Attention 2\nStarted at 10:11:12 on host\n")
    said = str(diff(a, b))
    assert "only A prints the words 'flash-attn not found, using default attention'; only B" in said
    assert "only B prints the words 'Using Flash Attention 2'\n" in said
    many = output(
        tmp_path / "c.log", head + "".join(f"Part {word} is read\n" for word in ("a", "b", "c", "d"))
    )
    assert "only A prints the words 'flash-attn not found" in str(diff(a, many))
    assert "only B prints the words" not in str(diff(a, many))


def test_outputs_of_other_numbers_of_processes_say_so(tmp_path):
    a = output(tmp_path / "a.log", "seed: 42\nrank words\nlr: 1e-6\n")
    b = output(tmp_path / "b.log", "seed: 42\n" * 4 + "lr: 1e-6\n" * 4)
    assert "each setting is printed 1 | 4 times, as by so many processes" in str(diff(a, b))
    uneven = output(tmp_path / "c.log", "seed: 42\n" * 4 + "lr: 1e-6\n" * 3)
    assert "as by so many processes" not in str(diff(a, uneven))


def test_names_of_settings_that_are_compared_are_left_out(tmp_path):
    a = output(tmp_path / "a.log", "seed=1 rho=2\n")
    b = output(tmp_path / "b.log", "seed=3 rho=4\n")
    assert differing_pairs(Head(a), Head(b), known={("seed", "1")}) == {"rho": "2 | 4"}
