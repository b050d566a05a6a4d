"""All programs, in the order in which they are measured."""

from __future__ import annotations

from benchmarks.user_programs.diffusion import DIFFUSION
from benchmarks.user_programs.images import IMAGES
from benchmarks.user_programs.language import LANGUAGE
from benchmarks.user_programs.plain import PLAIN

PROGRAMS = {**LANGUAGE, **IMAGES, **PLAIN, **DIFFUSION}
