"""Stand-ins for what does not fit on a laptop: a tiny model with its tokenizer, and a few prompts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bandpo_lab.errors import InvalidValue
from bandpo_lab.evals.dataset_io import read_rows

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.5,
}
"""The sizes of the tiny model.

The weights are large, so that some tokens are likely: a trust region is narrow for likely tokens only, and with a
nearly uniform distribution nothing would be clipped.
"""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RIGHT_ANSWER = "Answer: {0}\n#### {0}\n\\boxed{{{0}}}"
"""The text of a right answer, in the three forms that verl's rewards for mathematics look for."""


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return a byte-level tokenizer with the chat format of Qwen.

    It has no merges: transformers rebuilds the tokenizers of some families from their vocabulary alone, and only
    a bare alphabet of bytes stays the same.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    return fast


def write_model(source: str, folder: Path) -> PreTrainedTokenizerBase:
    """Write a random two-layer model to `folder` and return its tokenizer.

    Args:
        source: The recipe's model. If it is a folder, its architecture and its tokenizer are used. If it is a name on
            a hub, a Llama or a Qwen2 is used, according to the name, with a tokenizer of bytes.
        folder: The folder to write to.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer: PreTrainedTokenizerBase
    config: PretrainedConfig
    if Path(source).is_dir():
        tokenizer = AutoTokenizer.from_pretrained(source)
        config = AutoConfig.from_pretrained(source)
        config.update({name: size for name, size in TINY.items() if hasattr(config, name)})
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
    else:
        tokenizer = byte_tokenizer()
        config = AutoConfig.for_model(
            "llama" if "llama" in source.lower() else "qwen2", vocab_size=len(tokenizer), **TINY
        )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


@dataclass(frozen=True)
class Prompts:
    """A few rows in verl's format, and a description of their origin."""

    rows: list[dict[str, Any]]
    origin: str

    def answers(self, prompt_key: str, form: str) -> dict[str, str]:
        """Return a right answer for each prompt that has a short ground truth.

        Args:
            prompt_key: The column with the prompt's messages.
            form: The text of an answer, with `{0}` for the ground truth.

        Returns:
            The answers by the text of the prompt's last message.
        """
        answers = {}
        for row in self.rows:
            reward = row.get("reward_model")
            truth = reward.get("ground_truth") if isinstance(reward, dict) else None
            if isinstance(truth, str | int | float) and len(str(truth)) <= 12:
                answers[row[prompt_key][-1]["content"]] = form.format(truth)
        return answers


def _addition_rows(prompt_key: str) -> list[dict[str, Any]]:
    """Return made-up rows that ask for sums of two numbers."""
    question = "What is {} + {}? Write the answer in \\boxed{{}}."
    return [
        {
            prompt_key: [{"role": "user", "content": question.format(a, a + 3)}],
            "data_source": "math_dapo",
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * a + 3)},
            "extra_info": {"index": a},
        }
        for a in range(10, 26)
    ]


def _read_prompts(path: Path, prompt_key: str, limit: int = 500) -> list[dict[str, Any]]:
    """Return the first rows of a file, each of which has a prompt.

    Raises:
        ValueError: The file cannot be read, or a row has no prompt; the message names the file.
    """
    rows = read_rows(path, limit)
    for row in rows:
        messages = row.get(prompt_key)
        if not (
            isinstance(messages, list)
            and messages
            and all(isinstance(message, dict) and "content" in message for message in messages)
        ):
            raise InvalidValue(
                f"{path} has rows without a prompt: data.prompt_key is {prompt_key!r}, which has to hold messages; "
                f"a row has {', '.join(row)}"
            )
    return rows


def choose_prompts(files: list[str], prompt_key: str, tokenizer: Any, max_tokens: int, count: int) -> Prompts:
    """Return the first rows of the recipe's files whose prompt is short enough, or made-up rows if a file is missing.

    Args:
        files: The paths of the data files.
        prompt_key: The column with the prompt's messages.
        tokenizer: The tokenizer of the tiny model.
        max_tokens: The longest prompt, in tokens.
        count: The number of rows.

    Raises:
        ValueError: A file cannot be read, or there are too few rows.
    """
    paths = [Path(file).expanduser() for file in files]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        origin = f"made up, since {', '.join(missing)} is not here"
        return Prompts(_addition_rows(prompt_key)[:count], origin)

    def is_short(row: dict[str, Any]) -> bool:
        encoding = tokenizer.apply_chat_template(row[prompt_key], add_generation_prompt=True)
        return len(encoding["input_ids"]) <= max_tokens

    all_rows = itertools.chain.from_iterable(_read_prompts(path, prompt_key) for path in paths)
    rows = list(itertools.islice(filter(is_short, all_rows), count))
    if len(rows) < count:
        raise InvalidValue(
            f"of the first rows of {', '.join(map(str, paths))}, only {len(rows)} have a prompt of at most "
            f"{max_tokens} tokens under the stand-in's tokenizer; a rehearsal needs {count}"
        )
    return Prompts(rows, f"first rows of {', '.join(map(str, paths))}")


def write_rows(rows: list[dict[str, Any]], path: Path) -> Path:
    """Write rows to a parquet file, as verl reads it; return its path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return path
