"""The f-divergences that define trust regions, one class each. `base` documents the methods that a new one needs."""

from ..divergences import base, closed, custom, family, kl
from ..divergences._exact import expm1 as expm1
from ..divergences._exact import expm1_minus as expm1_minus
from ..divergences._exact import log1mexp as log1mexp
from ..divergences.base import *
from ..divergences.closed import *
from ..divergences.custom import *
from ..divergences.family import *
from ..divergences.kl import *

__all__: list[str] = []
__all__ += base.__all__
__all__ += closed.__all__
__all__ += custom.__all__
__all__ += family.__all__
__all__ += kl.__all__
