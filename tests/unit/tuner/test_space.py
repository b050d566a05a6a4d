"""Search spaces: reading, narrowing, and users' mistakes."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.space import Parameter, Space, load_space

SPACE = Space(
    (Parameter("threads", (1, 2, 4, 8)), Parameter("keep", ("a", "b")), Parameter("flag", (False, True))), "x"
)


def test_shipped_space_is_read() -> None:
    space = load_space("fusion", "cuda")
    assert space["threads_per_row"].choices[0] == 1
    assert space["online"].choices == (False, True)
    assert space["online"].about
    assert space.size > 1000


def test_cpu_section_has_its_own_parameters() -> None:
    assert {p.name for p in load_space("fusion", "cpu")}.isdisjoint({"vector_bytes"})


def test_a_copy_narrows_and_leaves_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('domain = "fusion"\nversion = 1\n[cuda.unroll]\nchoices = [4, 1]\n[cpu.parts]\nchoices = [4]\n')
    shipped, mine = load_space("fusion", "cuda"), load_space("fusion", "cuda", str(file))
    assert mine["unroll"].choices == (1, 4)
    assert mine["keep"].choices == shipped["keep"].choices
    assert mine.fingerprint != shipped.fingerprint
    assert load_space("fusion", "cpu", str(file))["parts"].choices == (4,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[cuda.unrol]\nchoices = [1]", ["unknown parameter cuda.unrol", "did you mean 'unroll'"]),
        ("[cuda.unroll]\nchoices = [3]", ["cuda.unroll cannot be 3", "[1, 2, 4, 8]"]),
        ("[cuda.keep]\nchoices = ['register']", ["cuda.keep", "did you mean 'registers'"]),
        ("[cuda.unroll]\nchoices = [true]", ["cuda.unroll cannot be true"]),
        ("[cuda.unroll]\nchoices = []", ["cuda.unroll", "no choices left"]),
        ("[cuda.unroll]\nchoices = 4", ["cuda.unroll", "choices = [1, 2, 4]"]),
        ("[cuda]\nunroll = [1]", ["cuda.unroll needs a list"]),
        ("[cuda.unroll]\nvalues = [1]", ["cuda.unroll needs a list"]),
        ("[cuda.unroll]\nchoices = [1]\nchoice = [2]", ["unknown key 'choice'", "did you mean 'choices'"]),
        ("[cudo.unroll]\nchoices = [1]", ["unknown section [cudo]", "did you mean 'cuda'"]),
        ("cuda = 3", ["cuda is a section", "[cuda.PARAMETER]"]),
        ("domian = 'fusion'", ["unknown key 'domian'", "did you mean 'domain'"]),
        ("domain = 'c3'", ["domain 'c3'", "'fusion'"]),
        ("version = 2", ["version 2"]),
        ("[cuda.unroll\n", ["invalid TOML"]),
    ],
)
def test_mistakes_are_reported_in_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        load_space("fusion", "cuda", str(file))
    message = str(error.value)
    assert message.startswith(str(file))
    assert "\n" not in message
    for word in words:
        assert word in message


def test_missing_file_and_not_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such search-space file"):
        load_space("fusion", "cuda", str(tmp_path / "none.toml"))
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        load_space("fusion", "cuda", str(tmp_path / "b.toml"))
    with pytest.raises(UserError, match="cannot read"):
        load_space("fusion", "cuda", str(tmp_path))


def test_mistakes_in_the_other_section_are_reported_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[cpu.threads]\nchoices = [3]")
    with pytest.raises(UserError, match=r"cpu\.threads cannot be 3"):
        load_space("fusion", "cuda", str(file))


def test_restrict_keeps_order_and_reports_an_empty_space() -> None:
    assert SPACE.restrict("threads", {8, 2, 16})["threads"].choices == (2, 8)
    with pytest.raises(UserError, match=r"x: none of threads = \[1, 2, 4, 8\] is possible .* one of \[64\]"):
        SPACE.restrict("threads", [64])
    with pytest.raises(KeyError):
        SPACE.restrict("thread", [1])


def test_contains_tells_types_apart() -> None:
    assert SPACE.contains({"threads": 1, "keep": "a", "flag": True})
    assert not SPACE.contains({"threads": True, "keep": "a", "flag": True})
    assert not SPACE.contains({"threads": 1, "keep": "a", "flag": 1})
    assert not SPACE.contains({"threads": 1, "keep": "a"})
    assert not SPACE.contains({"threads": 1, "keep": "a", "flag": True, "more": 1})


def test_at_goes_through_every_configuration_once() -> None:
    every = [tuple(SPACE.at(i).items()) for i in range(SPACE.size)]
    assert len(set(every)) == SPACE.size == 16
    assert all(SPACE.contains(dict(c)) for c in every)
    assert SPACE.contains(SPACE.sample(random.Random(0)))


def test_neighbours_are_one_step_away() -> None:
    near = SPACE.neighbours({"threads": 2, "keep": "a", "flag": True})
    assert {c["threads"] for c in near} == {1, 2, 4}
    assert len(near) == 4
    assert all(sum(c[k] != v for k, v in {"threads": 2, "keep": "a", "flag": True}.items()) == 1 for c in near)


def test_project_goes_to_the_nearest_by_ratio() -> None:
    assert SPACE.project({"threads": 48, "keep": "b", "flag": False, "gone": 1}) == {
        "threads": 8,
        "keep": "b",
        "flag": False,
    }
    assert SPACE.project({"threads": 3, "keep": "b", "flag": False}) == {"threads": 4, "keep": "b", "flag": False}
    assert SPACE.project({"threads": 1, "keep": "c", "flag": False}) is None
    assert SPACE.project({"threads": 1, "keep": "a"}) is None


def test_project_prefers_zero_for_zero_only() -> None:
    space = Space((Parameter("cap", (0, 32, 64)),))
    assert space.project({"cap": 40}) == {"cap": 32}
    assert space.project({"cap": 0}) == {"cap": 0}


def test_fingerprint_is_that_of_the_choices() -> None:
    assert SPACE.fingerprint == Space(SPACE.parameters, "elsewhere").fingerprint
    assert SPACE.fingerprint != SPACE.restrict("threads", [1, 2]).fingerprint


def test_importing_spaces_is_cheap() -> None:
    code = "import sys, autotune.space; print(sorted({'torch','optuna','sqlalchemy','numba'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
