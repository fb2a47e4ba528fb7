"""Files of runs as frameworks and trackers write them, by their own writers where those are installed."""

import json
import math
import pickle
import sqlite3
from contextlib import closing

import pytest
import torch

GROUPS, PROMPT, LENGTH = 8, 3, 9


def batch(step, temperature=1.0):
    """Sequences of different lengths whose engine samples at a temperature, with the entropy that slime can dump."""
    g = torch.Generator().manual_seed(step)
    logits = 2 * torch.randn(GROUPS * 4, LENGTH, 20, generator=g)
    trainer = logits.log_softmax(-1)
    engine = ((logits + 1e-3 * torch.randn(logits.shape, generator=g)) / temperature).log_softmax(-1)
    ids = torch.multinomial(engine.exp().flatten(0, 1), 1, generator=g).view(*logits.shape[:2], 1)
    reward = (ids.squeeze(2) % 2).float().mean(1)
    return {
        "prompt": torch.arange(GROUPS)[:, None].expand(-1, PROMPT).repeat_interleave(4, 0),
        "ids": ids.squeeze(2),
        "mask": torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (len(ids), 1), generator=g),
        "old": trainer.gather(2, ids).squeeze(2),
        "engine": engine.gather(2, ids).squeeze(2),
        "entropy": -(trainer.exp() * trainer).sum(-1),
        "reward": reward,
        "advantages": (reward.view(-1, 4) - reward.view(-1, 4).mean(1, keepdim=True)).flatten(),
    }


def nemo_rl(folder, step, d):
    """A line a sequence; everything is as long as prompt and answer together."""

    def whole(x, before=0.0):
        return torch.cat([torch.full((len(x), PROMPT), before, dtype=x.dtype), x], 1).tolist()

    advantages = d["advantages"][:, None].expand(-1, LENGTH)
    columns = {"token_ids": torch.cat([d["prompt"], d["ids"]], 1).tolist(), "rewards": d["reward"].tolist()}
    columns |= {"token_loss_mask": whole(d["mask"].int()), "advantages": whole(advantages)}
    columns |= {"generation_logprobs": whole(d["engine"]), "prev_logprobs": whole(d["old"])}
    columns |= {"content": ["?"] * len(advantages), "sample_loss_mask": [1.0] * len(advantages)}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    (folder / f"train_data_step{step}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def slime(folder, step, d, *, samples=True):
    """Of the answer alone, without padding, but for the tokens."""

    def cut(x):
        return [row[m] for row, m in zip(x, d["mask"], strict=True)]

    columns = {
        "log_probs": cut(d["old"]),
        "rollout_log_probs": cut(d["engine"]),
        "entropy": cut(d["entropy"]),
    }
    columns |= {
        "loss_masks": cut(d["mask"].int()),
        "advantages": cut(d["advantages"][:, None].expand(-1, LENGTH)),
    }
    columns["tokens"] = [torch.cat(pair) for pair in zip(d["prompt"], cut(d["ids"]), strict=True)]
    columns["truncated"] = [0] * len(d["ids"])
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    said = {"samples": rows, "raw_reward": d["reward"].tolist()}
    if not samples:
        said = {"rollout_data": columns | {"raw_reward": d["reward"].tolist()}}
    torch.save({"rollout_id": step, "rank": 0} | said, folder / f"{step}_0.pt")


def miles(folder, step, d):
    slime(folder, step, d, samples=False)


def rebuild(*_):
    raise AssertionError("a pickle's function was called")


class Rebuilt:
    """Pickled as SkyRL's batch is: a function of a module, called with a class and a state."""

    def __init__(self, state):
        self.state = state

    def __reduce__(self):
        return rebuild, (Rebuilt, self.state)


def skyrl(folder, step, d):
    columns = {"sequences": torch.cat([d["prompt"], d["ids"]], 1), "loss_mask": d["mask"].float()}
    columns |= {"action_log_probs": d["old"], "rollout_logprobs": d["engine"]}
    columns["advantages"] = d["advantages"][:, None].expand(-1, LENGTH).contiguous()

    def saved(x):
        x = x.numpy()
        return {"format": "numpy", "data": x.tobytes(), "shape": x.shape, "dtype": str(x.dtype)}

    state = {"batch_dict": {name: saved(x) for name, x in columns.items()} | {"values": None}}
    (folder / f"global_step_{step}_training_input.pkl").write_bytes(pickle.dumps(Rebuilt(state)))


def course(step):
    lost = {"grad_norm": float("nan")} if step == 50 else {"grad_norm": 0.1}
    return lost | {
        "reward": 0.1 + min(step, 20) / 50,
        "entropy": 1.2 * 0.05 ** (step / 60),
        "rewards/f/mean": float("nan"),
    }


def tensorboard(folder):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    for step in range(1, 61):
        for name, value in course(step).items():
            writer.add_scalar(f"train/{name}", value, step)
    writer.close()


def wandb(folder):
    pytest.importorskip("wandb")
    import wandb

    settings = wandb.Settings(mode="offline", silent=True, x_disable_stats=True)
    folder.mkdir()
    with wandb.init(project="p", dir=folder, settings=settings) as run:
        for step in range(1, 61):
            run.log({f"train/{name}": x for name, x in course(step).items()} | {"train/global_step": step})
    wandb.teardown()  # which waits until all is on the disk


def trackio(folder):
    """Two runs of a project; the second is the newer."""
    folder.mkdir()
    with closing(sqlite3.connect(folder / "project.db")) as store, store:
        store.execute(
            "CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name TEXT, step INTEGER, metrics TEXT)"
        )
        for run in ("old", "new"):
            for step in range(1, 61 if run == "new" else 30):
                row = {f"train/{name}": "NaN" if math.isnan(x) else x for name, x in course(step).items()}
                text = json.dumps(row | {"train/global_step": step}).encode()
                store.execute("INSERT INTO metrics VALUES (NULL, ?, ?, ?)", (run, step - 1, text))
