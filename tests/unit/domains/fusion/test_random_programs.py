"""The random programs themselves: reproducible, printable, and of every sort."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
import torch

from tests.support.random_programs.families import FAMILIES, program
from tests.support.random_programs.programs import FLOATS, dense

COUNT = 400


def test_a_seed_is_a_program() -> None:
    first, again = [[str(program(s)) for s in range(40)] for _ in range(2)]
    assert first == again
    assert len(set(first)) == 40


def test_the_printed_script_runs() -> None:
    """The text of a bug report, in a process without these tests."""
    text = "\n".join(str(program(s)).replace("def f(", f"def f{s}(").replace("(f(", f"(f{s}(") for s in range(25))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("largest", [300, 20_000])
def test_tensors_stay_below_the_bound(largest: int) -> None:
    for s in range(30):
        p = program(s, largest)
        with torch.no_grad():
            results = p.fn(*p.arguments())
        assert results
        assert all(t.numel() <= largest for t in results)


def test_every_sort_of_program_and_tensor_occurs() -> None:
    families, dtypes, layouts, text = Counter[str](), Counter[str](), Counter[str](), ""
    for s in range(COUNT):
        p = program(s)
        families[p.family] += 1
        families["train"] += p.train
        text += p.source
        for i in p.inputs:
            dtypes[i.dtype] += 1
            layouts["offset"] += i.offset > 0
            layouts["expanded"] += 0 in i.strides and i.shape != ()
            layouts["strided"] += i.strides != dense(i.shape) and 0 not in i.strides
            layouts["empty"] += 0 in i.shape
            layouts["scalar"] += i.shape == ()
            layouts["odd"] += any(n % 2 and n > 1 for n in i.shape)
            layouts["one"] += 1 in i.shape
    assert set(families) == {*FAMILIES, "train"}
    assert min(families.values()) >= 4, families
    assert {*FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool"} <= set(dtypes), dtypes
    assert min(layouts.values()) >= 3, layouts
    words = """sum( mean( amax( amin( var( std( prod( any( all( softmax( logsumexp( vector_norm( layer_norm( rms_norm(
        group_norm( batch_norm( cross_entropy( _backward( .to( where( masked_fill( cat( stack( transpose( permute(
        reshape( expand( select( repeat( pad( tril( index_select( gather( embedding( scatter(
        keepdim=True keepdim=False flip("""
    assert [w for w in words.split() if w not in text] == []
