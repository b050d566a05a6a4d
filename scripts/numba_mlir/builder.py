"""The part of llvmlite that the intrinsics of ``autotune.compiler.targets.cuda`` use, emitting MLIR.

:func:`install` puts it and numba-cuda-mlir where the intrinsics import ``llvmlite.ir`` and ``numba`` from. The files of
the intrinsics then run unchanged. Only a process without numba-cuda may do that.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from numba_cuda_mlir import cuda, tools, types
from numba_cuda_mlir import extending as mlir_extending
from numba_cuda_mlir._mlir import ir as mlir
from numba_cuda_mlir.lowering_utilities import memref_to_llvm_ptr
from numba_cuda_mlir.numba_cuda import dispatcher

_DYNAMIC = -(2**31)  # an index of llvm.getelementptr that is an operand


@dataclass(frozen=True)
class Type:
    """A type as MLIR spells it. A pointer also has its element's type, which MLIR leaves out."""

    text: str
    pointee: Type | None = None

    @property
    def mlir(self) -> mlir.Type:
        return mlir.Type.parse(self.text)

    def as_pointer(self, space: int = 0) -> Type:
        return Type(f"!llvm.ptr<{space}>" if space else "!llvm.ptr", self)

    def __call__(self, number: float) -> Value:
        return constant(self, number)


@dataclass(frozen=True)
class Value:
    """An MLIR value and its type. A tuple of Numba's is a Python tuple of these."""

    mlir: mlir.Value
    type: Type


I1 = Type("i1")


def _op(name: str, result: Type | None, operands: Sequence[Value], **attributes: Any) -> Any:
    """One operation of MLIR's dialect ``llvm``."""
    results = [result.mlir] if result else []
    made = mlir.Operation.create(f"llvm.{name}", results, [o.mlir for o in operands], attributes)
    return Value(made.results[0], result) if result else None


def constant(of: Type, number: Any) -> Value:
    """``llvmlite.ir.Constant``."""
    if number is UNDEFINED:
        return _op("mlir.undef", of, [])
    is_float = of.text == "f32"
    if not is_float:  # a pattern of bits, which MLIR takes as a signed number
        bits = int(of.text[1:])
        number = (int(number) + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1) if bits > 1 else int(number)
    attribute = mlir.FloatAttr.get(of.mlir, number) if is_float else mlir.IntegerAttr.get(of.mlir, number)
    return _op("mlir.constant", of, [], value=attribute)


UNDEFINED = object()


@dataclass(frozen=True)
class InlineAsm:
    type: tuple[Type | None, Sequence[Type]]
    text: str
    constraints: str
    side_effect: bool = False


class Builder:
    """``llvmlite.ir.IRBuilder``, at the place where the lowering is."""

    def __getattr__(self, name: str) -> Callable[[Value, Value], Value]:
        """Operations whose result is of their operands' type."""
        if (plain := name.rstrip("_")) not in ("add", "sub", "mul", "udiv", "urem", "and", "or", "shl", "lshr", "ashr"):
            raise AttributeError(name)
        return lambda x, y: _op(plain, x.type, [x, y])

    def select(self, test: Value, a: Value, b: Value) -> Value:
        return _op("select", a.type, [test, a, b])

    def icmp_unsigned(self, relation: str, x: Value, y: Value) -> Value:
        number = {"==": 0, "!=": 1, "<": 6, "<=": 7, ">": 8, ">=": 9}[relation]
        return _op("icmp", I1, [x, y], predicate=mlir.IntegerAttr.get(mlir.IntegerType.get_signless(64), number))

    def fcmp_ordered(self, relation: str, x: Value, y: Value) -> Value:
        number = {"==": 1, ">": 2, ">=": 3, "<": 4, "<=": 5, "!=": 6}[relation]
        return _op("fcmp", I1, [x, y], predicate=mlir.IntegerAttr.get(mlir.IntegerType.get_signless(64), number))

    def zext(self, x: Value, to: Type) -> Value:
        return _op("zext", to, [x])

    def sext(self, x: Value, to: Type) -> Value:
        return _op("sext", to, [x])

    def trunc(self, x: Value, to: Type) -> Value:
        return _op("trunc", to, [x])

    def ptrtoint(self, x: Value, to: Type) -> Value:
        return _op("ptrtoint", to, [x])

    def addrspacecast(self, x: Value, to: Type) -> Value:
        return _op("addrspacecast", to, [x])

    def bitcast(self, x: Value, to: Type) -> Value:
        return Value(x.mlir, to) if x.type.text == to.text else _op("bitcast", to, [x])

    def gep(self, pointer: Value, index: Sequence[Value]) -> Value:
        assert pointer.type.pointee is not None
        places = mlir.DenseI32ArrayAttr.get([_DYNAMIC])
        element = mlir.TypeAttr.get(pointer.type.pointee.mlir)
        return _op("getelementptr", pointer.type, [pointer, *index], rawConstantIndices=places, elem_type=element)

    def load(self, pointer: Value, align: int) -> Value:
        return _op("load", pointer.type.pointee, [pointer], alignment=_i64(align))

    def store(self, value: Value, pointer: Value, align: int) -> None:
        _op("store", None, [value, pointer], alignment=_i64(align))

    def extract_value(self, of: Any, k: int) -> Value:
        if isinstance(of, tuple):
            return of[k]
        part = of.type.text.removeprefix("!llvm.struct<(").removesuffix(")>").split(", ")[k]
        return _op("extractvalue", Type(part), [of], position=mlir.DenseI64ArrayAttr.get([k]))

    def extract_element(self, vector: Value, at: Value) -> Value:
        return _op("extractelement", Type(vector.type.text.split("x")[1].rstrip(">")), [vector, at])

    def insert_element(self, vector: Value, value: Value, at: Value) -> Value:
        return _op("insertelement", vector.type, [vector, value, at])

    def call(self, code: InlineAsm, operands: Sequence[Value]) -> Value | None:
        text = {"asm_string": code.text, "constraints": code.constraints}
        attributes: dict[str, Any] = {k: mlir.StringAttr.get(v) for k, v in text.items()}
        if code.side_effect:
            attributes["has_side_effects"] = mlir.UnitAttr.get()
        return _op("inline_asm", code.type[0], operands, **attributes)


def _i64(number: int) -> mlir.IntegerAttr:
    return mlir.IntegerAttr.get(mlir.IntegerType.get_signless(64), number)


def _data(context: Any, builder: Builder, array: Any) -> SimpleNamespace:
    """An array as ``make_array`` gives it: of its fields only the pointer."""
    memref = array.mlir.type
    zero = constant(Type("i64"), 0).mlir
    element = Type(str(memref.element_type))
    pointer = Value(memref_to_llvm_ptr(array.mlir, [zero], memref.element_type), Type("", element))
    here = Type(str(pointer.mlir.type), element)
    generic = element.as_pointer()
    same = here.text == generic.text
    return SimpleNamespace(data=Value(pointer.mlir, generic) if same else _op("addrspacecast", generic, [pointer]))


_CONTEXT = SimpleNamespace(
    make_array=lambda of: _data, make_tuple=lambda b, of, values: tuple(values), get_dummy_value=lambda: None
)


def _taken(value: Any, of: Any) -> Any:
    """Wrap a value of the lowering, of a Numba type, for the intrinsics."""
    if isinstance(value, tuple):
        return tuple(_taken(v, of.dtype) for v in value)
    text = str(value.type)
    return Value(value, Type(text, _spelled(of.dtype)) if isinstance(of, types.CPointer) else Type(text))


def _spelled(of: Any) -> Type:
    """The type of a number of Numba's."""
    return Type("f32" if of == types.float32 else f"i{of.bitwidth}")


def _given(value: Any) -> Any:
    """Unwrap a result for the lowering."""
    if isinstance(value, tuple):
        return tuple(_given(v) for v in value)
    return value.mlir if isinstance(value, Value) else value


def intrinsic(op: Callable[..., Any]) -> Any:
    """``numba.cuda.extending.intrinsic`` for a function that writes by llvmlite."""

    def typed(typingctx: Any, *args: Any) -> Any:
        signature, write = op(typingctx, *args)

        def lower(lowering: Any, target: Any, variables: Sequence[Any], keywords: Any) -> None:
            values = []
            for variable, of in zip(variables, signature.args, strict=True):
                value, has = lowering.load_var(variable), lowering.get_numba_type(variable.name)
                if not isinstance(of, types.Array):  # a variable may hold another width than its type has
                    value = lowering.lower_cast(has, of, value)
                values.append(_taken(value, of))
            lowering.store_var(target, _given(write(_CONTEXT, Builder(), signature, values)))

        return signature, lower

    typed.__signature__ = inspect.signature(op)  # type: ignore[attr-defined]
    typed.__name__ = typed.__qualname__ = op.__name__
    made = mlir_extending.intrinsic(typed)
    # Only functions registered before the first compilation are found without this.
    mlir_extending.refresh_registries(typing=True, target=False, include_uninitialized_cuda=False)
    return made


def install(capability: tuple[int, int]) -> None:
    """Put these in the place of ``numba`` and ``llvmlite.ir``, and compile for ``capability`` without a device."""
    tools._cached_cc = capability  # the answer of get_gpu_compute_capability
    llvm = ModuleType("llvmlite.ir")
    llvm.__dict__.update(
        IntType=lambda bits: Type(f"i{bits}"),
        FloatType=lambda: Type("f32"),
        VoidType=lambda: None,
        VectorType=lambda of, n: Type(f"vector<{n}x{of.text}>"),
        LiteralStructType=lambda of: Type(f"!llvm.struct<({', '.join(t.text for t in of)})>"),
        FunctionType=lambda result, operands: (result, operands),
        InlineAsm=InlineAsm,
        Constant=constant,
        Undefined=UNDEFINED,
    )
    numba = ModuleType("numba")
    extending = ModuleType("numba.cuda.extending")
    numba.__dict__.update(types=types, cuda=cuda)
    extending.__dict__.update(intrinsic=intrinsic)
    llvmlite = ModuleType("llvmlite")
    llvmlite.__dict__.update(ir=llvm)
    found = {"llvmlite": llvmlite, "llvmlite.ir": llvm, "numba": numba, "numba.cuda": cuda}
    found |= {"numba.cuda.extending": extending, "numba.cuda.dispatcher": dispatcher}
    sys.modules.update(found)
