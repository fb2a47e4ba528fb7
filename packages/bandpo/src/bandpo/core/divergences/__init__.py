"""The f-divergences that define trust regions, one class each. `base` documents the methods that a new one needs."""

from . import base, closed, custom, family, kl
from ._exact import expm1 as expm1
from ._exact import expm1_minus as expm1_minus
from ._exact import log1mexp as log1mexp
from ._exact import scaled_expm1 as scaled_expm1
from .base import *
from .closed import *
from .custom import *
from .family import *
from .kl import *

__all__: list[str] = []
__all__ += base.__all__
__all__ += closed.__all__
__all__ += custom.__all__
__all__ += family.__all__
__all__ += kl.__all__
