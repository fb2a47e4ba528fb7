"""The f-divergences that define trust regions, one class each. `base` documents the methods that a new one needs."""

from bandpo.divergences import base, closed, custom, family, kl
from bandpo.divergences._exact import expm1 as expm1
from bandpo.divergences._exact import expm1_minus as expm1_minus
from bandpo.divergences._exact import log1mexp as log1mexp
from bandpo.divergences.base import *
from bandpo.divergences.closed import *
from bandpo.divergences.custom import *
from bandpo.divergences.family import *
from bandpo.divergences.kl import *

__all__: list[str] = []
__all__ += base.__all__
__all__ += closed.__all__
__all__ += custom.__all__
__all__ += family.__all__
__all__ += kl.__all__
