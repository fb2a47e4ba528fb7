"""Band against Stable-Baselines3's own PPO on CartPole and Acrobot, by seeds; writes one CSV row per run.

    python benchmarks/discrete_actions.py benchmarks/results/discrete_actions.csv

Both sides run the published RL Baselines3 Zoo settings for PPO on the environment, with fewer steps; nothing was tuned
here, neither the settings nor Band's radius. Finished runs are kept: start it again to go on. One core, ~8 minutes.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import t as student
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from bandpo_stable_baselines3 import BandPPO

# rl-baselines3-zoo, hyperparams/ppo.yml. Its learning rate and clip for CartPole fall linearly to 0; the clip here is
# the constant 0.2 of its Acrobot, and of PPO's paper, so that both sides hold their rule through the run.
SETTINGS = {
    "CartPole-v1": {
        "n_envs": 8,
        "steps": 10_240,
        "ppo": {
            "n_steps": 32,
            "batch_size": 256,
            "gae_lambda": 0.8,
            "gamma": 0.98,
            "n_epochs": 20,
            "ent_coef": 0.0,
            "learning_rate": lambda remaining: 1e-3 * remaining,
        },
    },
    "Acrobot-v1": {
        "n_envs": 16,
        "steps": 32_768,
        "ppo": {"n_steps": 256, "gae_lambda": 0.94, "gamma": 0.99, "n_epochs": 4, "ent_coef": 0.0},
    },
}
# The second tells whether a difference is Band's shape or its width: at p = 1/2 and 1/3, where these policies start,
# Band lets the ratio go to 1.31 and 1.47.
RULES = ("PPO", "FixedClip(0.4, 0.4)", "Band(KL(), 0.05)")
SEEDS = tuple(range(100, 105))
FIELDS = ("environment", "rule", "seed", "steps", "training_return", "final_return")


def run(environment: str, rule: str, seed: int) -> dict[str, object]:
    """Train once: the mean return of all training episodes, and of 20 episodes of the final policy, actions sampled."""
    settings = SETTINGS[environment]
    env = make_vec_env(environment, n_envs=settings["n_envs"], seed=seed)
    shared = {**settings["ppo"], "seed": seed, "device": "cpu"}
    model = (
        PPO("MlpPolicy", env, **shared) if rule == "PPO" else BandPPO("MlpPolicy", env, clip=rule, **shared)
    )
    returns: list[float] = []

    def collect(scope: dict, _: dict) -> bool:
        returns.extend(info["episode"]["r"] for info in scope["infos"] if "episode" in info)
        return True

    model.learn(settings["steps"], callback=collect)
    test_env = make_vec_env(environment, seed=seed + 10_000)
    final, _ = evaluate_policy(model, test_env, n_eval_episodes=20, deterministic=False)
    return dict(
        zip(
            FIELDS, (environment, rule, seed, settings["steps"], statistics.mean(returns), final), strict=True
        )
    )


def interval(values: list[float]) -> str:
    """Mean and half-width of its 95 % t-interval."""
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.1f} ± {half:.1f}"


def summary(rows: list[dict[str, str]]) -> Table:
    """Each rule's returns over its seeds, and its difference from PPO seed by seed."""
    table = Table("environment", "rule", "seeds", "return in training", "return at the end")
    values: defaultdict[tuple, dict] = defaultdict(dict)
    for row in rows:
        for field in FIELDS[-2:]:
            values[row["environment"], row["rule"], field][row["seed"]] = float(row[field])
    for environment in SETTINGS:
        for rule in RULES:
            cells = [list(values[environment, rule, field].values()) for field in FIELDS[-2:]]
            table.add_row(environment, rule, str(len(cells[0])), *map(interval, cells))
        stock, *others = ([values[environment, rule, field] for field in FIELDS[-2:]] for rule in RULES)
        for rule, other in zip(RULES[1:], others, strict=True):
            paired = [[b[seed] - a[seed] for seed in b] for a, b in zip(stock, other, strict=True)]
            table.add_row(environment, f"{rule} − PPO", str(len(paired[0])), *map(interval, paired))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="CSV file; runs that it already holds are not repeated")
    path = parser.parse_args().output
    torch.set_num_threads(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(",".join(FIELDS) + "\n")
    with path.open() as file:
        done = {(row["environment"], row["rule"], row["seed"]) for row in csv.DictReader(file)}
    runs = [(e, r, s) for s in SEEDS for e in SETTINGS for r in RULES if (e, r, str(s)) not in done]
    for arguments in track(runs, "training", disable=not runs):
        row = run(*arguments)
        with path.open("a", newline="") as file:
            csv.DictWriter(file, FIELDS).writerow(row)
    with path.open() as file:
        Console().print(summary(list(csv.DictReader(file))))


if __name__ == "__main__":
    main()
