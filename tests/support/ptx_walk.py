"""One thread's way through compiled PTX, with every access checked: what the compiler made of a kernel, not its source.

The fake machine runs the source that is emitted, in which a guard comes before the load that it guards; a compiler may
change that order. Here integers, addresses and branches are exact, whereas the results of floating-point instructions
are zero: addresses do not depend on them. The thread is alone, whatever the number of its block and of all blocks: so
barriers pass at once, shuffles give back what they are given, nobody else votes, and another block's shared memory is
its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

_WIDTH = {"8": 1, "16": 2, "32": 4, "64": 8}
_SPACE = 1 << 40  # tensors are so far apart that no wrong address is inside another one
_SHARED = 1 << 20
_MOST_STEPS = 5_000_000
_SILENT = ("bar", "barrier", "membar", "fence", "createpolicy", "griddepcontrol")
_FLOATS = re.compile(r"\.(f16|f16x2|bf16|bf16x2|f32|f64)$")


class Outside(Exception):
    """An access outside every tensor and every shared or local array, or a misaligned one."""


class Tensor:
    """Bytes in global memory, zeros after ``content``."""

    def __init__(self, nbytes: int, content: bytes = b"") -> None:
        self.data = bytearray(content.ljust(nbytes, b"\0"))


def _signed(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def _compare(how: str, a: int, b: int) -> bool:
    return {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b,
            "lo": a < b, "ls": a <= b, "hi": a > b, "hs": a >= b}[how]  # fmt: skip


def _divide(a: int, b: int) -> int:
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "min": min,
    "max": max,
    "div": _divide,
    "rem": lambda a, b: a - b * _divide(a, b),
    "shl": lambda a, b: a << min(b & 0xFFFFFFFF, 64),
    "shr": lambda a, b: a >> min(b & 0xFFFFFFFF, 64),
}


class Walk:
    """A thread's registers and memory.

    Args:
        ptx: text of one kernel.
        pointers: a tensor for each pointer parameter; 64-bit numbers after them (the open extent) as they are.
        tid: number of the thread in its block.
        dynamic_shared: bytes of it.
        block: number of its block; ``blocks``: of all.
        rank: number of the block in its cluster.
    """

    def __init__(
        self,
        ptx: str,
        pointers: Sequence[Tensor | int],
        tid: int,
        dynamic_shared: int = 0,
        block: int = 0,
        blocks: int = 1,
        rank: int = 0,
    ) -> None:
        self.code, self.labels, self.symbols = _parse(ptx, dynamic_shared)
        self.tensors = {(k + 1) * _SPACE: p for k, p in enumerate(pointers) if isinstance(p, Tensor)}
        self.params = [p if isinstance(p, int) else (k + 1) * _SPACE for k, p in enumerate(pointers)]
        end = max([at + n for at, n in self.symbols.values()], default=_SHARED)
        self.shared = bytearray(end - _SHARED)
        self.registers: dict[str, int] = {"%tid.x": tid, "%ctaid.x": block, "%nctaid.x": blocks, "%laneid": tid % 32}
        self.written: set[int] = set()  # numbers of the pointers written through
        self.registers |= {"%nctaid.y": 1, "%cluster_ctarank": rank}
        self.copied = 0  # bytes, by asynchronous copies
        self.registers["%dynamic_smem_size"] = dynamic_shared

    def run(self) -> int:
        """Walk to the end; returns how many instructions that took.

        Raises:
            Outside: see there.
            NotImplementedError: an unknown instruction.
        """
        at = steps = 0
        while at < len(self.code):
            steps += 1
            if steps > _MOST_STEPS:
                raise RuntimeError("the thread goes on and on")
            predicate, name, operands = self.code[at]
            at += 1
            if predicate and bool(self.value(predicate.lstrip("!"))) == predicate.startswith("!"):
                continue
            if name.startswith("bra"):
                at = self.labels[operands[0]]
            elif name.startswith(("ret", "exit")):
                break
            else:
                self.step(name, operands)
        return steps

    def value(self, text: str) -> int:
        if text in self.registers:
            return self.registers[text]
        if text in self.symbols:
            return self.symbols[text][0]
        if text.startswith(("0f", "0d")):
            return int(text[2:], 16)
        if text.startswith("%"):
            raise NotImplementedError(f"{text} is read before it is written")
        return int(text, 0)

    def step(self, name: str, operands: list[str]) -> None:
        kind, *rest = name.split(".")
        if kind in _SILENT:
            for o in operands[:1] if kind == "createpolicy" else ():
                self.registers[o] = 0
        elif kind in ("ld", "st"):
            self.memory(kind, rest, operands)
        elif kind == "cp":
            self.copy(rest, operands)
        elif kind == "prefetch":
            self.find(rest, self.value(operands[0].strip("[] ")), 1)
        elif kind == "setp":
            self.registers[operands[0]] = int(self.test(rest, operands))
        elif kind == "selp":
            self.registers[operands[0]] = self.value(operands[1] if self.value(operands[3]) else operands[2])
        elif kind == "shfl":
            out, _, ok = operands[0].partition("|")
            self.registers[out] = self.value(operands[1])
            self.registers |= {ok: 1} if ok else {}
        elif kind == "vote":
            assert "ballot" in rest
            self.registers[operands[0]] = int(bool(self.value(operands[1]))) << self.registers["%laneid"]
        elif kind in ("mov", "cvta", "mapa"):
            self.move(operands[:2])
        elif kind == "cvt":
            self.registers[operands[0]] = self.convert(rest, operands[1])
        elif _FLOATS.search(name) or kind in ("ex2", "lg2", "rcp"):
            self.registers[operands[0]] = 0
        else:
            self.registers[operands[0]] = self.integer(kind, rest, operands)

    def integer(self, kind: str, rest: list[str], operands: list[str]) -> int:
        type_ = rest[-1]
        bits = 1 if type_ == "pred" else int(type_[1:])
        read = (lambda x: _signed(x, bits)) if type_[0] == "s" else (lambda x: x & ((1 << bits) - 1))
        xs = [read(self.value(o)) for o in operands[1:]]
        wide = 2 * bits if "wide" in rest else bits
        if kind == "mul" or kind == "mad":
            out = xs[0] * xs[1]
            out = out >> bits if "hi" in rest else out
            out += _signed(self.value(operands[3]), wide) if kind == "mad" else 0
        elif kind == "neg":
            out = -xs[0]
        elif kind == "not":
            out = ~xs[0]
        elif kind == "abs":
            out = abs(xs[0])
        elif kind == "popc":
            out = (xs[0] & ((1 << bits) - 1)).bit_count()
        elif kind in _ARITHMETIC:
            out = _ARITHMETIC[kind](xs[0], xs[1])
        elif kind == "bfi":
            mask = ((1 << xs[3]) - 1) << xs[2]
            out = xs[1] & ~mask | xs[0] << xs[2] & mask
        elif kind in ("bfe", "prmt", "lop3", "shf"):  # taken apart are elements, not addresses
            out = 0
        else:
            raise NotImplementedError(".".join([kind, *rest]))
        return out & ((1 << wide) - 1)

    def test(self, rest: list[str], operands: list[str]) -> bool:
        type_ = rest[-1]
        if type_.startswith(("f", "bf")):
            return False
        bits = int(type_[1:])
        xs = [self.value(o) & ((1 << bits) - 1) for o in operands[1:3]]
        if type_[0] == "s":
            xs = [_signed(x, bits) for x in xs]
        return _compare(rest[0], *xs)

    def move(self, operands: list[str]) -> None:
        to, start = operands
        if to.startswith("{"):
            parts = to.strip("{} ").split(",")
            x = self.value(start)
            for k, part in enumerate(parts):
                self.registers[part.strip()] = x >> (k * 64 // (2 * len(parts))) & 0xFFFFFFFF
        elif start.startswith("{"):
            self.registers[to] = 0
        else:
            self.registers[to] = self.value(start)

    def convert(self, rest: list[str], start: str) -> int:
        to, have = rest[-2], rest[-1]
        if _FLOATS.search("." + to) or _FLOATS.search("." + have):
            return 0
        x = self.value(start)
        x = _signed(x, int(have[1:])) if have[0] == "s" else x & ((1 << int(have[1:])) - 1)
        return x & ((1 << int(to[1:])) - 1)

    def memory(self, kind: str, rest: list[str], operands: list[str]) -> None:
        width = _WIDTH[rest[-1][1:]]
        vector = next((int(r[1:]) for r in rest if re.fullmatch(r"v\d", r)), 1)
        place = operands[0 if kind == "st" else 1]
        base, _, offset = place.strip("[] ").partition("+")
        if rest[0] == "param":
            self.registers[operands[0]] = self.params[int(base.rsplit("_", 1)[1])]
            return
        address = self.value(base) + (int(offset, 0) if offset else 0)
        data, at = self.find(rest, address, width * vector)
        if kind == "st":
            if address >= _SPACE:
                self.written.add(address // _SPACE - 1)
            for k, o in enumerate(_items(operands[1])):
                data[at + k * width : at + (k + 1) * width] = (self.value(o) & ((1 << 8 * width) - 1)).to_bytes(
                    width, "little"
                )
            return
        for k, o in enumerate(_items(operands[0])):
            here = data[at + k * width : at + (k + 1) * width]
            self.registers[o] = int.from_bytes(here, "little", signed=rest[-1][0] == "s")

    def copy(self, rest: list[str], operands: list[str]) -> None:
        """An asynchronous copy, done at once; its other instructions only wait."""
        if "shared" not in rest:
            return
        to, start = (self.value(o.strip("[] ")) for o in operands[:2])
        n = int(operands[2], 0)
        (into, at), (data, begin) = self.find(["shared"], to, n), self.find(["global"], start, n)
        into[at : at + n] = data[begin : begin + n]
        self.copied += n

    def find(self, rest: list[str], address: int, nbytes: int) -> tuple[bytearray, int]:
        if {"shared", "shared::cta", "shared::cluster", "local"} & set(rest) or address < _SPACE:
            data, at, what = self.shared, address - _SHARED, "shared memory"
        else:
            start = address // _SPACE * _SPACE
            if start not in self.tensors:
                raise Outside(f"address {address:#x} belongs to no tensor")
            data, at = self.tensors[start].data, address - start
            what = f"pointer {start // _SPACE - 1}"
        if at < 0 or at + nbytes > len(data):
            raise Outside(f"{nbytes} bytes at {at} of {what}, which has {len(data)}")
        if at % nbytes:
            raise Outside(f"{nbytes} bytes at {at} of {what} are not aligned")
        return data, at


def _items(text: str) -> list[str]:
    return [x.strip() for x in text.strip("{} ").split(",")]


def _parse(ptx: str, dynamic_shared: int) -> tuple[list[tuple[str, str, list[str]]], dict[str, int], Any]:
    """Instructions as (predicate, name, operands), the labels' places, and (address, bytes) of each shared array."""
    symbols: dict[str, tuple[int, int]] = {}
    free = _SHARED
    for name, n in re.findall(r"\.(?:shared|local) \.align \d+ \.b8\s+(\w+)\[(\d*)\]", ptx):
        free = -(-free // 128) * 128
        symbols[name] = free, int(n) if n else dynamic_shared
        free += symbols[name][1]
    body = ptx[ptx.index("{", ptx.index(".entry")) + 1 : ptx.rindex("}")]
    code: list[tuple[str, str, list[str]]] = []
    labels: dict[str, int] = {}
    for line in (raw.partition("//")[0].strip() for raw in body.splitlines()):
        label = re.fullmatch(r"(\$?\w+):", line)
        if label:
            labels[label.group(1)] = len(code)
            continue
        for text in (t.strip() for t in line.split(";")):
            text = re.sub(r"^([{}]\s*)+", "", text)  # of inline assembly with separate registers
            if not text or text.startswith("."):
                continue
            if text.startswith("call"):
                raise NotImplementedError(text)
            m = re.fullmatch(r"(?:@(!?%?\w+)\s+)?(\S+)\s*(.*)", text)
            assert m, text
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", m.group(3))
            code.append((m.group(1) or "", m.group(2), operands))
    return code, labels, symbols
