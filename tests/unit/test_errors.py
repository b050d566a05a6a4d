"""Messages for exceptions of the user's program."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.exc import CppCompileError, InductorError

from autotune.errors import first_line
from autotune.measure.server import explain


def test_the_type_and_the_first_line_are_reported() -> None:
    assert first_line(ValueError("  bad\nworse")) == "ValueError: bad"
    assert first_line(ValueError()) == "ValueError"
    assert first_line(ValueError("while tracing:\n  bad\nworse")) == "ValueError: while tracing: bad"


def test_the_output_of_a_compiler_is_reported_without_its_command() -> None:
    """On a full disk g++ names the disk after a command of 1500 characters."""
    output = "<built-in>: fatal error: writing header.i: No space left on device\ncompilation terminated."
    cause = CppCompileError(["g++", "header.hpp", *["-D OPTION"] * 200], output)
    error = InductorError(cause, None)  # type: ignore[arg-type]
    for line in (first_line(error), explain(error)):
        assert "C++ compile error: <built-in>: fatal error" in line
        assert "No space left on device" in line
        assert "OPTION" not in line


def test_dynamos_own_error_is_reported() -> None:
    def embeds(x: Tensor) -> Tensor:
        return F.embedding(x, torch.ones(4, 4))

    torch._dynamo.reset()
    with pytest.raises(
        Exception, match="Expected tensor for argument"
    ) as caught:  # before torch 2.13 no more than that
        torch.compile(embeds, backend="eager", fullgraph=True)(torch.rand(3))
    said = first_line(caught.value)
    assert "\n" not in said
    assert "'indices' to have one of the following scalar types: Long, Int" in said
