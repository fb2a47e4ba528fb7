"""Compare two configurations in the quantities of `rlvet.compare.vocabulary`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from rlvet._numbers import format_setting
from rlvet._secrets import is_secret
from rlvet.compare import openrlhf, prime_rl, trl, verl
from rlvet.compare.settings import DEFAULTS, LARGEST, LONGEST_VALUE, Settings
from rlvet.compare.vocabulary import (
    AVERAGES_OF_TERMS,
    QUANTITIES,
    PerProcess,
    Quantity,
    Reading,
    Training,
)
from rlvet.lint.checks import without_defaults
from rlvet.lint.known import FRAMEWORKS
from rlvet.runs.configuration import Configuration, Unresolved
from rlvet.runs.held_settings import MODEL_CONFIG, QUANTIZATION

COMPARED: Mapping[str, Mapping[str, Callable[[Settings], Any]]] = {
    "trl": trl.QUANTITIES,
    "verl": verl.QUANTITIES,
    "openrlhf": openrlhf.QUANTITIES,
    "prime-rl": prime_rl.QUANTITIES,
}
"""The frameworks whose configurations are compared, with the functions that compute their quantities."""

EQUAL_AT_ONE = ("clipped ratio", "CISPO", "SAPO", "DPPO", "without a ratio")
"""Beginnings of the policy losses whose gradient is −A·∇log π where every ratio is 1."""

ONE_UPDATE = "each batch gets one update, so that every ratio is 1"
"""The reason why a difference of the clip has no effect."""

NAMES_AND_PATHS = re.compile(
    r"(^|\.)(output_dir|run_name|report_to|project(_name)?|experiment(_name)?|logger|logging\w*|log_\w+|save_\w+|"
    r"hub_\w+|push_to_hub|default_local_dir|default_hdfs_dir|test_freq|save_freq|val_\w+|do_eval|eval_\w+|"
    r"per_device_eval_batch_size|num_generations_eval|disable_tqdm|resume\w*|max_(actor|critic)_ckpt_to_keep|overwrite_\w+|"
    r"rollout_data_dir|validation_data_dir|trackio_\w+|wandb\w*|dataset_config|num_completions_to_print|val_kwargs)"
    r"($|\.)|^trainer\.val_|checkpoint\.|^config$|trust_remote_code$|^hydra\.|^defaults$|_target_$|profiler|"
    r"record_(path|detail)$|^(runtime_env|config_name|config_path|no_wait|working_dir|address)$"
)
"""Names of settings of logging, saving, evaluation and names, which change nothing that is trained."""

SPEED = re.compile(
    r"(micro_batch_size|dynamic_bsz|max_token_len|gpu_memory_utilization|parallel_size|offload|n_gpus_per_node|"
    r"nnodes|nproc_per_node|num_processes|fsdp_size|dataloader_|num_workers|enforce_eager|max_num_(seqs|batched_tokens)|"
    r"chunked|torch_compile|remove_padding|(gradient|activation)_checkpointing|"
    r"vllm_(mode|server|gpu|tensor|enable|group|max_model)|"
    r"use_liger|use_shm|free_cache_engine|load_format|layered_summon|balance_batch|use_cpu|ddp_|deepspeed|fsdp$|"
    r"fsdp_config$|tf32|update_weights_bucket|forward_prefetch|reshard_after_forward|pin_memory|per_device_train_batch_size|"
    r"prefix_caching|model_engine|attn_implementation|use_fused_kernels|ray_kwargs|nccl_timeout|"
    r"ray_wait_register|megatron\.|transfer_queue|hybrid_engine|use_legacy_worker_impl)"
)
"""Names of settings of memory, time and machines."""

WITHOUT_CONDITION = re.compile(
    r"^(vllm_importance_sampling_\w+|sapo_temperature_\w+|vespo_\w+|ref_model_\w+|entropy_(target|coef\w*))$"
    r"|^actor_rollout_ref\.actor\.(kl_loss_type|loss_scale_factor|tau_pos|tau_neg|clip_ratio\w*|kl_loss_coef)$"
    r"|^algorithm\.(rollout_correction\.\w+|kl_ctrl\.\w+|kl_penalty|norm_adv_by_std_in_grpo|filter_groups\.\w+)$"
    r"|lora_alpha$|lora\.alpha$|min_lr_ratio$|max_prompt_length$|(^|\.)(lr_)?warmup_\w++$|rollout\.prompt_length$"
)
"""Names of settings that only act beside others. One that was not read has no effect."""


@dataclass(frozen=True)
class QuantityDifference:
    """A quantity whose values differ, or may differ, in two configurations."""

    quantity: Quantity
    a: Reading
    b: Reading
    note: str = ""
    """The reason why the difference has no effect, or cannot be decided; empty for one that has."""

    def as_json(self) -> dict[str, Any]:
        """Return the difference as a dictionary for JSON."""
        return {
            "name": self.quantity.name,
            "effect": self.quantity.effect,
            "a": _reading_as_json(self.quantity, self.a),
            "b": _reading_as_json(self.quantity, self.b),
            "note": self.note,
        }


@dataclass(frozen=True)
class SettingDifference:
    """A setting without a quantity that differs in two configurations of one framework, or that only one has."""

    name: str
    a: str
    b: str
    """The values as text; ``not set`` for a setting that a configuration does not have."""

    def __str__(self) -> str:
        return f"{self.name} {self.a} | {self.b}"


@dataclass(frozen=True)
class ConfigurationComparison:
    """The differences of two configurations, in the order of `QUANTITIES`."""

    a: Training
    b: Training
    differences: Sequence[QuantityDifference] = ()
    """Quantities that differ, and change the gradient or the data."""
    without_effect: Sequence[QuantityDifference] = ()
    """Quantities that differ, and have no effect beside the other settings."""
    undecided: Sequence[QuantityDifference] = ()
    """Quantities of which at least one value is not known."""
    in_neither: Sequence[str] = ()
    """Quantities whose values are not known in either file."""
    speed: Sequence[str] = ()
    """Differences that change memory and time only, as text."""
    unjudged: Sequence[SettingDifference] = ()
    """Settings without a quantity that differ, whose effect is not known."""
    names: Sequence[str] = ()
    """Settings of names, paths, logging and evaluation that differ."""
    compared: int = 0
    """The number of quantities whose two values are known."""
    shape: str = ""
    """The shape of both models in words; empty if their names are known, or one shape is not, or they differ."""

    @property
    def differs(self) -> bool:
        """True if something differs that changes the gradient or the data, or whose effect is not known."""
        return bool(self.differences or self.unjudged)

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as a dictionary for JSON."""
        return {
            "frameworks": [_title(self.a.framework), _title(self.b.framework)],
            "compared": self.compared,
            "differences": [difference.as_json() for difference in self.differences],
            "without_effect": [difference.as_json() for difference in self.without_effect],
            "undecided": [difference.as_json() for difference in self.undecided],
            "in_neither": list(self.in_neither),
            "speed": list(self.speed),
            "unjudged": [{"name": one.name, "a": one.a, "b": one.b} for one in self.unjudged],
            "names": list(self.names),
        }


def _title(framework: str) -> str:
    """Return the name of a framework with the version of its defaults."""
    return f"{FRAMEWORKS[framework].title} {DEFAULTS[framework]['version']}"


def format_value(quantity: Quantity, reading: Reading) -> str:
    """Return the value of a quantity as text.

    >>> format_value(QUANTITIES[1], Reading(0.8)), format_value(QUANTITIES[1], Reading(None))
    ('0.8', 'none')
    """
    value = reading.value
    if reading.unknown:
        return "not known"
    if value is None:
        return quantity.none
    return format_setting(float(value)) if _is_number(value) else str(value)[:LONGEST_VALUE]


def _reading_as_json(quantity: Quantity, reading: Reading) -> dict[str, Any]:
    """Return a value with its settings as a dictionary for JSON."""
    settings = []
    for origin in reading.origins:
        settings.append({"name": origin.name, "value": _plain(origin.value), "source": origin.source})
    return {"value": format_value(quantity, reading), "unknown": reading.unknown, "settings": settings}


def _plain(value: Any) -> Any:
    """Return a value of JSON: short text for other types, and for numbers that JSON does not have."""
    if isinstance(value, bool | None):
        return value
    if isinstance(value, int | float) and abs(value) < LARGEST:
        return value
    return str(value)[:LONGEST_VALUE]


def read_training(configuration: Configuration) -> Training:
    """Return what a configuration of one of the `COMPARED` frameworks trains.

    Args:
        configuration: The configuration.

    >>> training = read_training(Configuration("verl", "run.sh", {}))
    >>> training.value("average of the loss"), training.value("updates on a batch")
    ('mean over the tokens of an update', 4.0)
    """
    framework = configuration.framework
    if configuration.is_saved:
        configuration = without_defaults(configuration)
    settings = Settings(configuration)
    title = FRAMEWORKS[framework].title
    readings = {one.name: Reading(None, unknown=f"is not read for {title}") for one in QUANTITIES}
    for name, compute in COMPARED[framework].items():
        readings[name] = settings.reading(compute)
    prefix = f"{MODEL_CONFIG}."
    names = [name for name in configuration.settings if name.startswith(prefix)]
    shape = {name.removeprefix(prefix): settings.origin(name) for name in names}
    values = {name: setting.value for name, setting in configuration.settings.items() if name not in names}
    has_lines = any(setting.line is not None for setting in configuration.settings.values())
    file = "" if has_lines else settings.file
    return Training(
        framework,
        configuration.path,
        readings,
        values,
        shape,
        file,
        frozenset(settings.names_read),
        bool(configuration.absent),
    )


def compare_configurations(a: Training, b: Training) -> ConfigurationComparison:
    """Compare what two configurations train.

    Args:
        a: The first configuration.
        b: The second configuration.
    """
    differences: list[QuantityDifference] = []
    without_effect: list[QuantityDifference] = []
    undecided: list[QuantityDifference] = []
    in_neither: list[str] = []
    speed: list[str] = []
    compared = 0
    for quantity in QUANTITIES:
        readings = (a.readings[quantity.name], b.readings[quantity.name])
        if not _applies(quantity, a, b):
            continue
        if quantity.name == "model":
            shapes = _shapes_that_differ(a, b)
            if shapes is not None:
                differences.append(QuantityDifference(quantity, *shapes))
                compared += 1
                continue
        # TRL names a data set of the hub, verl a file.
        is_of_two_kinds = quantity.name == "data set" and a.framework != b.framework
        if is_of_two_kinds or all(reading.unknown for reading in readings):
            in_neither.append(quantity.name)
            continue
        if any(reading.unknown for reading in readings):
            reason = readings[0].unknown or readings[1].unknown
            undecided.append(QuantityDifference(quantity, *readings, reason))
            continue
        processes = _processes_for_equality(readings[0].value, readings[1].value)
        if processes:
            note = f"equal with {processes:g} processes, whose number is not in the configuration"
            undecided.append(QuantityDifference(quantity, *readings, note))
            continue
        compared += 1
        if _are_equal(readings[0].value, readings[1].value):
            continue
        if quantity.with_ratio and _ratio_is_idle(a, b):
            without_effect.append(QuantityDifference(quantity, *readings, ONE_UPDATE))
        elif quantity.effect == "speed":
            texts = [format_value(quantity, reading) for reading in readings]
            speed.append(f"{quantity.name} {texts[0]} | {texts[1]}")
        else:
            differences.append(QuantityDifference(quantity, *readings))
    without_quantity = _other_settings(a, b, _settings_of_unknown(a, b, in_neither))
    is_one_framework = a.framework == b.framework
    return ConfigurationComparison(
        a=a,
        b=b,
        differences=differences,
        without_effect=without_effect,
        undecided=undecided,
        in_neither=in_neither,
        speed=[*speed, *map(str, without_quantity["speed"])],
        unjudged=without_quantity["unjudged"] if is_one_framework else (),
        names=[setting.name for setting in without_quantity["names"]],
        compared=compared,
        shape=_common_shape(a, b),
    )


SHAPE_WORDS = {
    "model_type": "",
    "hidden_size": "hidden size ",
    "num_hidden_layers": "layers ",
    "num_experts": "experts ",
    QUANTIZATION: "",
    "dtype": "",
    "vocab_size": "vocabulary ",
    "intermediate_size": "intermediate size ",
    "num_attention_heads": "attention heads ",
    "num_key_value_heads": "key-value heads ",
}
"""The words before each part of a model's shape, the most telling part first."""


def _shapes_that_differ(a: Training, b: Training) -> tuple[Reading, Reading] | None:
    """Return the parts of the shapes of two models that differ, each as a reading of the model.

    None if they do not differ, if one is not known, or if the names of the models tell them apart.
    """
    names = [a.readings["model"], b.readings["model"]]
    are_named = not any(reading.unknown for reading in names)
    if (are_named and not _are_equal(names[0].value, names[1].value)) or not (a.shape and b.shape):
        return None
    parts = []
    for name in SHAPE_WORDS:
        values = [training.shape[name].value if name in training.shape else None for training in (a, b)]
        is_known = None not in values or name == QUANTIZATION
        if is_known and not _are_equal(values[0], values[1]):
            parts.append(name)
    if not parts:
        return None
    first, second = (
        Reading(_shape_text(one, parts), tuple(one.shape[name] for name in parts if name in one.shape))
        for one in (a, b)
    )
    return first, second


MAIN_PARTS = ("hidden_size", "num_hidden_layers")
"""Parts without which a model's shape is not known."""


def _common_shape(a: Training, b: Training) -> str:
    """Return the shape of two models in words if it is the same and their names do not tell more."""
    are_named = not (a.readings["model"].unknown or b.readings["model"].unknown)
    is_known = all(name in training.shape for name in MAIN_PARTS for training in (a, b))
    if are_named or not is_known or _shapes_that_differ(a, b) is not None:
        return ""
    common = [name for name in SHAPE_WORDS if name in a.shape and name in b.shape]
    return _shape_text(a, common)


def _shape_text(training: Training, parts: Sequence[str]) -> str:
    """Return parts of a model's shape in words, as many as `LONGEST_VALUE` has space for."""
    text = ""
    for name in parts:
        words = "not quantized"
        if name in training.shape:
            words = f"{SHAPE_WORDS[name]}{training.shape[name].value}"
        longer = f"{text}, {words}" if text else words
        if len(longer) > LONGEST_VALUE:
            break
        text = longer
    return text


def _applies(quantity: Quantity, a: Training, b: Training) -> bool:
    """Return whether a quantity can differ: not if what it belongs to is off, or if it is that of the policy loss."""
    if quantity.only_with:
        for training in (a, b):
            parent = training.readings[quantity.only_with]
            if parent.value is None and not parent.unknown:
                return False
    if quantity.name in AVERAGES_OF_TERMS:
        return any(one.value(quantity.name) != one.value("average of the loss") for one in (a, b))
    return True


def _ratio_is_idle(a: Training, b: Training) -> bool:
    """Return whether the ratio has no effect in two configurations, as it is always 1 and no bound excludes 1."""
    for training in (a, b):
        loss = training.value("policy loss")
        if not training.ratios_are_one or loss is None or not loss.startswith(EQUAL_AT_ONE):
            return False
        above = training.value("clip above")
        if loss.startswith("CISPO") and above is not None and above < 1:
            return False
    return True


def _are_equal(first: Any, second: Any) -> bool:
    """Return whether two values are equal, numbers up to rounding."""
    if isinstance(first, PerProcess) and isinstance(second, PerProcess):
        return _are_equal(first.number, second.number)
    if _is_number(first) and _is_number(second):
        return first == second or math.isclose(first, second, rel_tol=1e-9)
    return type(first) is type(second) and first == second


def _is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number of a usual size, which can be compared up to rounding."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _processes_for_equality(first: Any, second: Any) -> float:
    """Return the number of processes with which a number for each process equals one in all; 0 if there is none."""
    if isinstance(second, PerProcess):
        first, second = second, first
    if not isinstance(first, PerProcess) or not _is_number(second) or not first.number:
        return 0
    processes = second / first.number
    return processes if processes >= 1 and processes == int(processes) else 0


LONGEST_OTHER = 40
"""The most characters of the value of a setting without a quantity."""


def _settings_of_unknown(a: Training, b: Training, in_neither: Sequence[str]) -> set[str]:
    """Return the settings that belong to quantities known of neither side, and to no quantity that is known."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for training in (a, b):
        for name, reading in training.readings.items():
            names[name in in_neither].update(origin.name for origin in reading.origins)
    return names[True] - names[False]


def _other_settings(
    a: Training, b: Training, of_unknown: Collection[str]
) -> dict[str, list[SettingDifference]]:
    """Return the settings without a known quantity that differ, by kind: ``speed``, ``names`` and ``unjudged``.

    Args:
        a: The first configuration.
        b: The second configuration.
        of_unknown: The settings of quantities that are known of neither.
    """
    kinds: dict[str, list[SettingDifference]] = {"speed": [], "names": [], "unjudged": []}
    read = a.read | b.read
    has_critic = "a critic" in (a.value("baseline"), b.value("baseline"))
    for name in dict.fromkeys((*a.settings, *b.settings)):
        # The split into micro-batches is part of quantities, and otherwise a matter of memory.
        is_compared = name not in of_unknown and (name in read or bool(WITHOUT_CONDITION.search(name)))
        if name == "program" or (is_compared and not SPEED.search(name)):
            continue
        if name.startswith("critic.") and not has_critic:
            continue
        values = [_value_or_default(training, name) for training in (a, b)]
        if a.framework == b.framework and _are_equal(values[0], values[1]):
            continue
        difference = SettingDifference(name, *(_text(training, name) for training in (a, b)))
        if SPEED.search(name):
            if a.framework == b.framework:
                kinds["speed"].append(difference)
        elif NAMES_AND_PATHS.search(name):
            kinds["names"].append(difference)
        else:
            kinds["unjudged"].append(difference)
    return kinds


def _value_or_default(training: Training, name: str) -> Any:
    """Return the value of a setting, or its default."""
    if name in training.settings:
        value = training.settings[name]
        return f"{value.reason} {value.known_part}" if isinstance(value, Unresolved) else value
    return DEFAULTS[training.framework]["defaults"].get(name)


def _text(training: Training, name: str) -> str:
    """Return the value of a setting as text."""
    if name not in training.settings:
        return "not set"
    value = training.settings[name]
    text = value.reason if isinstance(value, Unresolved) else str(value)
    if is_secret(name, text):
        return "not shown"
    if len(text) <= LONGEST_OTHER:
        return text
    # Long paths differ at their ends.
    return f"…{text[-LONGEST_OTHER:]}" if "/" in text else text[:LONGEST_OTHER]
