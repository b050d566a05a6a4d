"""Each of Inductor's options has been looked at: what it means for the results of regions is written down."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from torch._inductor import codecache, config

from autotune.compiler.capture.options import REQUIREMENTS, requirements

TABLE = tomllib.loads(Path(__file__).with_name("inductor_options.toml").read_text())
KINDS = ("graph", "rounding", "nothing", "obeyed", "differs")
NAMED = [*REQUIREMENTS, *(name for kind in KINDS for name in TABLE[kind])]


def unknown(names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in NAMED and not name.startswith(tuple(TABLE["prefixes"]))]


def test_every_option_of_this_torch_has_been_looked_at() -> None:
    assert not unknown(config._config), "what do they do to results? write it into inductor_options.toml or options.py"
    assert unknown(["emulate_precision_casts", "trace.enabled", "emulate_something_else"]) == ["emulate_something_else"]


def test_no_option_is_of_two_kinds() -> None:
    assert sorted(set(NAMED)) == sorted(NAMED)


def test_every_switch_in_the_key_of_inductors_cache_has_been_looked_at() -> None:
    source = inspect.getsource(codecache.FxGraphHashDetails.__init__)
    found = set(re.findall(r"torch\.(?:(?:is|are|get)_\w+|backends\.[\w.]+|utils\.[\w.]+)", source))
    assert "torch.are_deterministic_algorithms_enabled" in found
    assert found <= set(TABLE["switches"])


def test_nothing_is_required_by_default() -> None:
    assert requirements() == ()
    for name, requirement in REQUIREMENTS.items():
        if name in config._config:
            assert config._config[name].default == requirement.default, name


def test_a_request_names_its_option() -> None:
    with config.patch({"emulate_precision_casts": True}):
        (told,) = requirements("cpu")
        assert told == "emulate_precision_casts requires values that are rounded to 16 bits after each operator"
        assert requirements("cuda:1") == requirements() == (told,)


@pytest.mark.parametrize("name", ["eager_numerics.division_rounding", "eager_numerics.disable_ftz"])
def test_strict_cuda_kernels_meet_options_of_eager_numerics(name: str) -> None:
    with config.patch({name: True}):
        assert len(requirements()) == len(requirements("cuda:0")) == 1
        assert requirements("cuda:0", "strict") == requirements("cpu") == ()
