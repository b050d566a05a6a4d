"""Where a search of the outer scheme begins among strips that are copied to shared memory ahead of their walks.

Either blocks take turns on an SM, some loading while others store, or everything is on the device at the same time: all
is read at once and then written at once. What counts is how many blocks fit an SM, by shared memory and by registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from autotune.compiler.program.program import Program
from autotune.compiler.schedules.configurations import has_online
from autotune.compiler.schedules.cuda.outer_shape import (
    HELD,
    SMS,
    across,
    clusters,
    crowded,
    kept_words,
    lanes,
    lines,
    may_copy,
    vectors,
)
from autotune.compiler.schedules.cuda.rows import CAPS
from autotune.compiler.targets.cuda.cubin import SmLimits
from autotune.ir.graph import Graph
from autotune.task import Config

SYSTEM = 1024
"""Bytes of shared memory that the system takes for each block."""
WORK = 20, 4
"""Registers that a thread needs beside what it holds, and for each lane: running maxima and sums, what is computed."""
MOST = SmLimits()


class Sized(Protocol):
    """What is asked of the scheme here; see ``autotune.compiler.schedules.cuda.outer.OuterScheme``."""

    @property
    def program(self) -> Callable[..., Program]: ...

    def shared(self, graph: Graph, config: Config) -> tuple[int, int]: ...


def copied_seeds(scheme: Sized, graph: Graph, default: Config) -> list[Config]:
    """Variations of ``default`` whose strips are copied ahead; none where nothing can be."""
    program = scheme.program(graph)
    wide = next((b for b in vectors(program) if b <= 16), 0)
    default = default | {"vector_bytes": wide, "keep": "shared", "prefetch": True, "online": False, "unroll": 2}
    default |= {"cluster": 1, "blocks_per_sm": 0}
    if not wide or not may_copy(program, default):
        return []
    return (_whole(scheme, graph, default) if crowded(program) else []) + _in_turn(scheme, graph, default)


def _in_turn(scheme: Sized, graph: Graph, default: Config) -> list[Config]:
    """Three blocks an SM or more, under a register cap that lets them, in the smallest clusters that have strips so
    small."""
    program, wide = scheme.program(graph), int(default["vector_bytes"])
    out: list[Config] = []
    for strip in (64, 32, 128):  # bytes
        t = max(1, strip // wide, across(program, wide))
        shape = default | {"threads_per_row": t, "rows_per_block": max(1, 256 // t)}
        for cluster in (1, *clusters(program)):
            config = shape | {"cluster": cluster}
            fit = MOST.shared // (sum(scheme.shared(graph, config)) + SYSTEM)
            if fit >= 3:
                cap = max((c for c in CAPS if c * 256 * fit <= MOST.registers), default=0)
                out.append(config | {"max_registers": cap if cap >= 40 else 0})
                break
    return out + ([out[0] | {"online": True}] if out and has_online(program) else [])


def _whole(scheme: Sized, graph: Graph, default: Config) -> list[Config]:
    """Strips that are all on the device at the same time, or in two waves.

    A part of each lies in registers where shared memory alone does not hold them. No SM waits for a last, short wave
    then. But neither does one strip hide what another one computes, so maximum and sum of exponentials are found
    online, while copies arrive.
    """
    program, wide, online = scheme.program(graph), int(default["vector_bytes"]), has_online(scheme.program(graph))
    vec = lanes(program, wide)
    default = default | {"online": online, "unroll": 2 if vec > 4 else 4}
    shapes = [(64, 256), (64, 512), (32, 256), (128, 256)]  # bytes, threads
    if vec <= 4:  # a block of all threads that 64 registers allow: with more lanes it spills
        shapes.insert(1, (64, 1024))
    for waves in (1, 2):
        out: list[Config] = []
        for strip, threads in shapes:
            t = max(1, strip // wide, across(program, wide))
            shape = default | {"threads_per_row": t, "rows_per_block": max(1, threads // t)}
            fitting = (_fitting(scheme, graph, shape | {"cluster": c}, waves) for c in (1, *clusters(program)))
            out += [c for c in fitting if c is not None][:1]
        if out:
            first = out[0]
            others = [first | {"load_hint": "prefetch"}]  # strips that are neighbours are read at the same time
            twice = _fitting(scheme, graph, first | {"online": False, "held": 0}, waves) if online else None
            return [first, *others, *([twice] if twice else []), *out[1:]]
    return []


def _fitting(scheme: Sized, graph: Graph, config: Config, waves: int) -> Config | None:
    """``config`` with as much in registers as lets all blocks run in ``waves``, under a cap.

    None if they cannot, or would leave many places empty.
    """
    program = scheme.program(graph, True, bool(config["online"]))
    vec = lanes(program, int(config["vector_bytes"]))
    threads = int(config["threads_per_row"]) * int(config["rows_per_block"])
    blocks = -(-lines(program, vec) // int(config["threads_per_row"])) * int(config["cluster"])
    each = -(-blocks // (SMS * waves))  # blocks an SM
    if not 1024 <= each * threads <= MOST.threads or each > MOST.blocks or 10 * blocks < 7 * each * SMS * waves:
        return None
    packs = -(-program.n_cols // (int(config["rows_per_block"]) * int(config["cluster"])))
    strip, static = scheme.shared(graph, config)
    room = min(MOST.shared // each // 128 * 128 - SYSTEM, MOST.shared_block) - static
    over = packs - room // max(1, strip // packs)
    held = min((n for n in HELD if n >= over), default=packs)
    cap = max((c for c in CAPS if c * threads * each <= MOST.registers), default=0)
    if held >= packs or held * kept_words(program, vec) + WORK[0] + WORK[1] * vec > cap:
        return None
    return config | {"held": held, "max_registers": cap}
