"""CUDA's text of a kernel is read as the nodes that it was printed from.

Simulated tests run another print, which shares operators and statements with this one. What it does not share is
printed here a second time: with every possible parenthesis, and with names from a separate table.
"""

from __future__ import annotations

import ast
import re
import zlib
from dataclasses import replace
from typing import Any

import pytest

from autotune.compiler.kernel.nodes import Binary, Const, Expr, Item, Load, Op, Select, Store, Unary, Unpack, Var
from autotune.compiler.planner.groups import group_configs
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.targets.cuda.device import Shared, await_copies, copy_ahead, put, remote_store, shuffle, take
from autotune.compiler.targets.cuda.printer import CudaPrinter, operator_text
from autotune.compiler.targets.cuda.source import CudaSource
from autotune.domains.fusion.task import FusionTask
from tests.support.zoo import random_configs, workloads

KERNELS = {
    "bgrl_bf16": "rows", "embedding_ln": "rows", "every_function": "flat", "flipped": "flat", "group_norm": "tile",
    "layer_norm_backward": "columns", "outer_softmax_bf16": "outer", "transposed": "transpose",
    "scatter_tied": "scatter",
}  # fmt: skip
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int64": "i64", "int32": "i32", "bool": "b1"}
HINT = {"default": "d", "coherent": "c", "streaming": "s", "no_allocate": "n", "evict_first": "e", "evict_last": "l"}
LOAD = {
    ("plain", False): "ld", ("fixed", False): "lk", ("words", False): "lr",
    ("plain", True): "lg", ("words", True): "lw",
}  # fmt: skip


class Sure(CudaPrinter):
    """Prints all parentheses, without operator precedence."""

    def call(self, name: str, args: Any) -> str:
        return f"{name}({', '.join(f'({self.text(a)})' for a in args)})"

    def for_Binary(self, x: Binary) -> str:
        return f"(({self.text(x.left)}) {x.op} ({self.text(x.right)}))"

    def for_Unary(self, x: Unary) -> str:
        return f"({x.op}({self.text(x.value)}))"

    def for_Item(self, x: Item) -> str:
        return f"({self.text(x.base)})[{self.text(x.index)}]"

    def for_Op(self, x: Op) -> str:
        return operator_text(x.name, x.of, [f"({self.text(a)})" for a in x.args], self.strict)

    def for_Load(self, x: Load) -> str:
        name = f"{LOAD[x.form, x.guard is not None]}_{SHORT[x.storage]}_{x.lanes}_{HINT[x.hint]}"
        return self.call(name, [a for a in (x.pointer, x.index, x.guard) if a is not None])

    def for_Unpack(self, x: Unpack) -> str:
        return f"un_{SHORT[x.storage]}_{x.lanes}({self.text(x.words)})"

    def put_Store(self, s: Store) -> None:
        lanes = len(s.values)
        value = self.text(s.values[0]) if lanes == 1 else f"({self.tuple_of(s.values)})"
        guard = "" if s.guard is None else f", {self.text(s.guard)}"
        name = f"{'sg' if guard else 'st'}_{SHORT[s.storage]}_{lanes}_{HINT[s.hint]}"
        self.put(f"{name}({self.text(s.pointer)}, {self.text(s.index)}, {value}{guard})")

    def put_Shared(self, s: Shared) -> None:
        self.put(f"{s.name.name} = cuda.shared.array({s.count}, {s.type})")


class _Flat(ast.NodeTransformer):
    """Python reads ``a and b and c`` as one operator of three."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        parts = [x.values if isinstance(x, ast.BoolOp) and type(x.op) is type(node.op) else [x] for x in node.values]
        return ast.BoolOp(node.op, [x for part in parts for x in part])


def read(text: str) -> list[str]:
    """Python's parse of a text, statement by statement."""
    return [ast.dump(_Flat().visit(s)) for s in ast.parse(text).body]


def sources(name: str) -> list[CudaSource]:
    """Kernels of a region in the default and another configuration."""
    (work, *_) = workloads(name)
    task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
    found = []
    for config in [task.default(), *random_configs(task, 1, zlib.crc32(name.encode()))]:
        for group, part in zip(task.plan.groups, group_configs(task.plan, config), strict=True):
            found += scheme_of(group.graph).emit(group.graph, part, 3).sources
    assert KERNELS[name] in {scheme_of(g.graph).name for g in task.plan.groups}
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_text_is_read_as_the_nodes_it_was_printed_from(name: str) -> None:
    for made in sources(name):
        for source in (replace(made, fast=True), replace(made, fast=False)):
            sure = Sure(strict=not source.fast)
            *functions, kernel = ast.parse(source.text).body
            assert [ast.dump(_Flat().visit(f)) for f in functions] == read("\n\n".join(sure.functions(source.body)))
            assert isinstance(kernel, ast.FunctionDef)
            body = read("\n".join(sure.block(source.body)))
            assert [ast.dump(_Flat().visit(s)) for s in kernel.body][-len(body) :] == body


def test_these_kernels_have_every_form_of_access() -> None:
    text = "\n".join(s.text for name in KERNELS for s in sources(name))
    found = set(re.findall(r"\b(l[a-z]|s[gt]|un)_[a-z]+\d+_\d+", text))
    assert found >= {"ld", "lg", "lk", "lr", "st", "sg", "un"}


A, B, C = (Var(name, "float32") for name in "abc")


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (A - (B - C), "a - (b - c)"),
        (A - B - C, "a - b - c"),
        ((A + B) * -C, "(a + b) * -c"),
        (-(A + B), "-(a + b)"),
        ((A < B).equals(C), "(a < b) == c"),
        (Binary("and", A < B, Binary("or", A < C, B < C)), "a < b and (a < c or b < c)"),
        (A / (B * C), "a / (b * c)"),
        ((A | B) & C, "(a | b) & c"),
        (A[B + 1], "a[b + 1]"),
        (Select(A < B, A, B - C), "sel(a < b, a, b - c)"),
        (Op("sub", (A, Op("mul", (B, C), "float32", "float32")), "float32", "float32"), "(a - (b * c))"),
        (Load("bfloat16", 8, "streaming", A, B, "words", C), "lw_bf16_8_s(a, b, c)"),
        (Load("bool", 1, "default", A, Const(0), "fixed"), "lk_b1_1_d(a, 0)"),
        (copy_ahead("float32", 4, "prefetch", (A, B, Const(8)), C, A + B).value, "copy_f32_4_p(a, b, 8, c, a + b)"),
        (await_copies(3).value, "await_copies_3()"),
        (take("bfloat16", 4, (A, B, Const(8))), "take_bf16_4(a, b, 8)"),
        (put((A, B, Const(8)), (C, A)).value, "put_f32_2(a, b, 8, (c, a,))"),
        (remote_store(A, B, Const(1), C).value, "rs_float32(a, b, 1, c)"),
        (shuffle(A, 4), "cuda.shfl_xor_sync(4294967295, a, 4)"),
    ],
)
def test_operands_and_names(x: Expr, text: str) -> None:
    assert CudaPrinter().text(x) == text
