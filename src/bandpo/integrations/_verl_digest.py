"""``${bandpo.digest:}`` in a config of verl: a name for all settings of the run, so that each has a folder of its own.

verl resumes whatever checkpoint lies in ``trainer.default_local_dir``, without a look at its settings.
"""

from __future__ import annotations

import copy
import hashlib
import json
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

if TYPE_CHECKING:
    from omegaconf import DictConfig

IGNORED = (
    "ray_kwargs",
    "recipe.output",
    "trainer.default_hdfs_dir",
    "trainer.default_local_dir",
    "trainer.log_val_generations",
    "trainer.logger",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep",
    "trainer.resume_from_path",
    "trainer.resume_mode",
    "trainer.rollout_data_dir",
    "trainer.save_freq",
    "trainer.validation_data_dir",
)
"""Where and how often a run is written, and the Ray it runs on: a resumed run may differ there."""


def digest(*, _root_: DictConfig) -> str:
    """Eight hexadecimal digits (SHA-256) of the composed config, without what `IGNORED` names.

    Args:
        _root_: The whole config; omegaconf passes it to a resolver under this name.

    >>> def folder(**settings):
    ...     trainer = {"default_local_dir": "runs/${bandpo.digest:}"}
    ...     return OmegaConf.create({"trainer": trainer, **settings}).trainer.default_local_dir
    >>> folder(lr=1e-6) == folder(lr=0.000001), folder(lr=1e-6) == folder(lr=2e-6)
    (True, False)
    """
    config = copy.deepcopy(_root_)
    for key in IGNORED:
        if OmegaConf.select(config, key.rpartition(".")[0] or key) is not None:
            OmegaConf.update(config, key, None, force_add=True)
    settings = json.dumps(OmegaConf.to_container(config, resolve=True), sort_keys=True, default=str)
    return hashlib.sha256(settings.encode()).hexdigest()[:8]


OmegaConf.register_new_resolver("bandpo.digest", digest, replace=True)
