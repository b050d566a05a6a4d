"""Declarations of kernels: each mistake is one line with its correction."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autotune
from autotune.domains.kernel.declare import from_file, narrow, read_shapes
from autotune.errors import UserError
from tests.support.own import kernels


def kernel(x: Any, n: int = 3, *, block: int = 64, mode: str = "a") -> Any:
    return x


SPACE: dict[str, Any] = {"block": [32, 64, 128], "mode": ["a", "b"]}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"space": {}}, "no parameters"),
        ({"space": []}, "the list of configurations is empty"),
        ({"space": {"block": []}}, "block has no choices"),
        ({"space": {"block": 64}}, "needs a list of choices"),
        ({"space": {"block": "64"}}, "needs a list of choices"),
        ({"space": {"block": [64, 64]}}, "the choice 64 twice"),
        ({"space": {"block": [64, print]}}, "a choice is a finite number, a string"),
        ({"space": {"block": [64, None]}}, "a choice is a finite number, a string"),
        ({"space": {"block": [64, float("nan")]}}, "a choice is a finite number"),
        ({"space": {"tile": [1]}}, "has no parameter 'tile'"),
        ({"space": {"block": [32, 128]}}, "the default block = 64 is not one of its choices"),
        ({"space": {"n": [1, 2]}}, "the default n = 3"),
        ({"space": {"x": [1, 2]}}, "x has no default"),
        ({"space": 3}, "the space is a int"),
        (
            {"space": [{"block": 64}, {"mode": "a"}]},
            "configuration 2 must have the same parameters as the first: check block, mode",
        ),
        ({"space": [{"block": 64}, 3]}, "configuration 2 is 3"),
        ({"default": {"tile": 3}}, "the default has tile"),
        ({"default": {"block": 63}}, "the default block = 63"),
        ({"default": 3}, "is not a dict"),
        ({"constraints": ["block < 32"]}, "no configuration satisfies the constraints (block < 32)"),
        ({"constraints": ["block < 64"]}, "the default block=64 mode=a is invalid"),
        ({"constraints": ["block <"]}, "is not an expression"),
        ({"key": ["y"]}, "the key names 'y', which is not a parameter"),
        ({"key": ["x", "x"]}, "the key names 'x' twice"),
        ({"key": ["block"]}, "block is tuned"),
        ({"reference": 3}, "reference= is a int"),
        ({"inputs": 3}, "inputs= is a int"),
        ({"inputs": [{"x": 1}], "shapes": [{"n": 1}]}, "leave one out"),
        ({"inputs": kernels.make, "shapes": [3]}, "shapes= has 3"),
        ({"metrics": {"GB/s": 3}}, "the metric 'GB/s'"),
        ({"objective": 3}, "objective= needs autotune.Objective"),
        ({"objective": autotune.Objective(lambda call: 1.0, "J", "down")}, "objective= needs autotune.Objective"),
        ({"outputs": ["out"]}, "outputs= has 'out'"),
        ({"tolerance": 0.0}, "tolerance= 0.0"),
        ({"distance": 1.0}, "distance= is a float"),
    ],
)
def test_a_mistake_is_one_line(how: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        autotune.tunable(**{"space": SPACE, **how})(kernel)
    assert said in str(error.value)
    assert "test_declare:kernel" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_object_that_is_no_kernel_is_reported() -> None:
    with pytest.raises(UserError, match="cannot be called"):
        autotune.tunable(space=SPACE)(3)
    with pytest.raises(UserError, match="needs a space: write"):
        autotune.tunable(kernel)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="tunable already"):
        autotune.tunable(space=SPACE)(autotune.tunable(space=SPACE)(kernel))
    with pytest.raises(UserError, match="give a space"):
        autotune.tunable()(kernel)


def test_two_kernels_of_one_name_are_reported() -> None:
    autotune.tunable(space=SPACE, name="same")(kernel)
    autotune.tunable(space=SPACE, name="same")(kernel)  # declared again, as a notebook does
    with pytest.raises(UserError, match="two kernels have the name same"):
        autotune.tunable(space={"block": [1, 2]}, name="same")(kernels.plain)


def test_two_kernels_that_no_file_has_are_told_by_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def kernel(x, block=64):\n    return x\n"
    # Python 3.13 keeps the text of ``python -c`` under this name, which all texts have that exec compiles.
    monkeypatch.setitem(linecache.cache, "<string>", (len(text), None, text.splitlines(True), "<string>"))
    first, second = ({"__name__": name} for name in ("typed_first", "typed_second"))
    for module in (first, second):
        exec(text, module)
    autotune.tunable(space={"block": [64, 128]}, name="typed")(first["kernel"])
    with pytest.raises(UserError, match="two kernels have the name typed"):
        autotune.tunable(space={"block": [64, 128]}, name="typed")(second["kernel"])


def test_the_default_comes_from_the_signature_or_the_list() -> None:
    assert autotune.tunable(space=SPACE)(kernel).kernel.space.default == {"block": 64, "mode": "a"}
    assert autotune.tunable(space=SPACE, default={"mode": "b"})(kernel).kernel.space.default["mode"] == "b"
    listed = autotune.tunable(space=[{"block": 128}, {"block": 32}, {"block": 128}])(kernel).kernel.space
    assert (listed.default, len(listed.points), listed.space["block"].choices) == ({"block": 128}, 2, (32, 128))


def test_a_list_is_no_product() -> None:
    points = [{"block": 32, "mode": "a"}, {"block": 128, "mode": "b"}]
    space = autotune.tunable(space=points)(kernel).kernel.space
    assert space.space.size == 4
    assert space.reject({"block": 32, "mode": "b"}) == "it is not in the list"
    assert space.nearest({"block": 32, "mode": "b"}) in points
    assert [space.nearest(p) for p in points] == points


def test_a_constraint_may_read_the_key() -> None:
    space = autotune.tunable(space=SPACE, key=["n"], constraints=["block <= 16 * n"])(kernel).kernel.space
    assert space.reject({"block": 128, "mode": "a"}, {"n": 4}) == "it violates the constraint block <= 16 * n"
    assert space.reject({"block": 64, "mode": "a"}, {"n": 4}) is None
    with pytest.raises(UserError, match="reads n, which is not a parameter"):
        space.reject({"block": 64, "mode": "a"}, {"m": 4})
    with pytest.raises(UserError, match="no configuration satisfies"):
        space.check({"n": 1})


FILE = """
[plain]
key = ["x"]
reference = "doubled"
inputs = "tests.support.own.kernels:make"
constraints = ["block < 8"]
shapes = [{n = 4}]
[plain.space]
block = [1, 2, 4, 8]
"""


def test_a_file_declares_the_same(tmp_path: Path) -> None:
    path = tmp_path / "kernels.toml"
    path.write_text(FILE)
    made = from_file(kernels.plain, path, {})
    assert (made.reference, made.inputs, made.shapes) == (kernels.doubled, kernels.make, [{"n": 4}])
    assert made.space.reject({"block": 8}) == "it violates the constraint block < 8"
    decorated = autotune.tunable(space=str(path))(kernels.plain)
    assert decorated.kernel.space.default == {"block": 1}
    assert decorated(np.ones(2), block=2).sum() == 2
    with pytest.raises(UserError, match="key is also declared in the code"):
        autotune.tunable(space=str(path), key=["x"])(kernels.plain)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("plain", "other", "no table [plain]"),
        ("[plain.space]\nblock = [1, 2, 4, 8]", "", "needs a table [plain.space]"),
        ('key = ["x"]', 'keys = ["x"]', "unknown key 'keys'"),
        ('"doubled"', '"tripled"', "has no 'tripled'"),
        ('"doubled"', "3", "name a function"),
        ('"tests.support.own.kernels:make"', '"tests.nowhere:make"', "importing tests.nowhere failed"),
        ('"block < 8"', '"exit()"', "it may have"),
        ("[1, 2, 4, 8]", "[]", "block has no choices"),
        ("[plain]", "domain = 3\n[plain]", "the file is of domain 3"),
        ("[plain]", "[plain", "invalid TOML"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "kernels.toml"
    assert old in FILE
    path.write_text(FILE.replace(old, new))
    with pytest.raises(UserError) as error:
        from_file(kernels.plain, path, {})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_narrows_the_declaration_in_the_code(tmp_path: Path) -> None:
    path = tmp_path / "narrow.toml"
    path.write_text("[scale.space]\nblock = [16, 64]\n")
    space = narrow(kernels.scale.kernel, path).space
    assert (space.space["block"].choices, space.names) == ((16, 64), ["block", "late"])
    assert space.reject({"block": 256, "late": False}) == "it is not in the space"
    for text, said in (
        ("[scale.space]\nblock = [17]", "block cannot be 17"),
        ("[scale.space]\ntile = [16]", "no parameter 'tile'"),
        ('[scale]\nkey = ["x"]', "key is declared in the code"),
        ('[scale]\nconstraints = ["block > 16"]', "constraints is declared in the code"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=said):
            narrow(kernels.scale.kernel, path)


def test_shapes_are_tables_or_lines(tmp_path: Path) -> None:
    for name, text in (
        ("s.toml", "[[shapes]]\nn = 4\n[[shapes]]\nn = 8\nm = 'a'\n"),
        ("s.jsonl", '{"n": 4}\n\n{"n": 8, "m": "a"}\n'),
    ):
        (tmp_path / name).write_text(text)
        assert read_shapes(str(tmp_path / name)) == [{"n": 4}, {"n": 8, "m": "a"}]
    for name, text, said in (
        ("s.toml", "n = 4", r"needs tables \[\[shapes\]\]"),
        ("s.toml", "shapes = [4]", "shape 1 is 4"),
        ("s.toml", "shapes = []", "the file has no shapes"),
        ("s.jsonl", '{"n": 4}\nn = 8', "line 2 is not a JSON object"),
        ("s.jsonl", "", "the file has no shapes"),
        ("s.jsonl", "[4]", "shape 1 is"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=said):
            read_shapes(str(tmp_path / name))
    with pytest.raises(UserError, match="no such file of shapes"):
        read_shapes(str(tmp_path / "none.jsonl"))
