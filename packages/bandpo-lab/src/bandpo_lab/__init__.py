"""The lab of bandpo: prepare data, train, evaluate and compare models, with the command `bandpo-lab`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bandpo_lab.toy.comparison import Comparison, compare

    __version__: str

__all__ = ["Comparison", "compare"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        # All three distributions are built from one commit, and so have one version.
        import rlvet

        return rlvet.__version__
    # Imported on first access, so that `bandpo-lab --help` does not import torch and matplotlib.
    if name in __all__:
        from bandpo_lab.toy import comparison

        return getattr(comparison, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
