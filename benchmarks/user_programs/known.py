"""All programs, in the order in which they are measured."""

from __future__ import annotations

from benchmarks.user_programs.diffusion import DIFFUSION
from benchmarks.user_programs.held_out import HELD_OUT
from benchmarks.user_programs.held_out_second import HELD_OUT_SECOND
from benchmarks.user_programs.images import IMAGES
from benchmarks.user_programs.language import LANGUAGE
from benchmarks.user_programs.plain import PLAIN

PROGRAMS = {**LANGUAGE, **IMAGES, **PLAIN, **DIFFUSION}
"""Programs that autotune is developed with."""
ALL = {**PROGRAMS, **HELD_OUT, **HELD_OUT_SECOND}
"""These and the programs that it is only measured with."""
