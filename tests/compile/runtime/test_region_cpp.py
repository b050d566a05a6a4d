"""C++ that launches a region's kernels, compiled against a driver that prints its calls."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.errors import Unsupported
from autotune.runtime.deployment import Deployment, deployment, use
from autotune.runtime.inductor.region_call import RegionCall
from autotune.runtime.inductor.region_cpp import INCLUDES, RegionCpp, literal, prepared, write_call
from autotune.runtime.ladder import Level, Match
from autotune.runtime.launch.prepared import TensorSpec
from autotune.store import Key, Schedule
from autotune.task import Artifact, Config, Kernel
from tests.support.cuda_schedules import built, cut

STUB = Path(__file__).parents[2] / "support" / "driver_stub.h"
KEY = Key("workload", "device", "environment", "by hand")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    use(Deployment())
    yield
    use(Deployment())


def call_of(what: tuple[Any, Config, Artifact], change: Any = None, **fields: Any) -> RegionCall:
    """A call of a region of 64 x 256 floats, whose schedule was just looked up."""
    task, config, artifact = what
    if change is not None:
        artifact = replace(artifact, kernels=tuple(change(k) for k in artifact.kernels))
    workload = task.workload
    schedule = Schedule(KEY, config, 10.0, {}, artifact, "autotune", workload.family, workload.extent)
    deployment().keep_match("cuda:0", Match(Level.EXACT, schedule, workload))
    spec = TensorSpec((64, 256), (256, 1), torch.float32)
    made = RegionCall(
        label="softmax", spec=workload.spec, tuned=workload.fingerprint, slots=(0,), results=(0,), inputs=(spec,),
        outputs=(spec,), device="cuda:0", source=workload.source,
    )  # fmt: skip
    return replace(made, **fields)


def ran(tmp_path: Path, calls: Sequence[RegionCall], main: str) -> list[str]:
    """The stubs' output for a program that has ``calls`` as functions f0, f1, ... and runs ``main``."""
    written = RegionCpp()
    text, names, counts, sizes = "", [], {}, {}
    for call in calls:
        name, before = written.function(call.text(), "softmax")
        text += before
        names.append(name)
        for one in prepared(call).launches:
            counts[one.kernel.entry] = len(one.pointers) + one.dynamic
            sizes[one.kernel.code] = len(one.kernel.code)
    cubins = re.findall(r"char (autotune_cubin_\d+)\[\]", text)
    parts = [INCLUDES, STUB.read_text(), text]
    listed = ", ".join(f'{{"{entry}", {n}}}' for entry, n in counts.items())
    parts.append(f"const std::map<std::string, int> argument_counts = {{{listed}}};")
    listed = ", ".join(f"{{{name}, sizeof({name}) - 1}}" for name in cubins)
    parts.append(f"const std::map<const char*, size_t> cubin_sizes() {{ return {{{listed}}}; }}")
    aliases = "".join(f"  auto* f{k} = {name};\n" for k, name in enumerate(names))
    parts.append(f'int main() {{\n{aliases}{main}\n  std::printf("alive %d\\n", alive);\n}}')
    source, binary = tmp_path / "region.cpp", tmp_path / "region"
    source.write_text("\n".join(parts))
    subprocess.run(
        ["g++", "-std=c++17", "-Wall", "-Werror", "-Wno-unused-variable", "-o", str(binary), str(source)], check=True
    )
    return subprocess.run([binary], check=True, capture_output=True, text=True).stdout.splitlines()


def fnv(data: bytes) -> int:
    value = 14695981039346656037
    for b in data:
        value = (value ^ b) * 1099511628211 % 2**64
    return value


TENSORS = "AtenTensorOpaque x{0x10000}, odd{0x10004}, y{0x80000}; auto stream = reinterpret_cast<cudaStream_t>(77);"


def launches(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if line.startswith("launch")]


def test_a_kernel_is_loaded_once_a_device_and_launched_as_it_is_stored(tmp_path: Path) -> None:
    call = call_of(built())
    (one,) = prepared(call).launches
    lines = ran(tmp_path, [call], f"{TENSORS} f0(0, stream, &x, &y); f0(0, stream, &x, &y); f0(1, stream, &x, &y);")
    rule, sha = one.kernel.launch, fnv(one.kernel.code)
    values = [{0: 0x10000, 1: 0x80000}[p] for p in one.pointers] + [one.extent0] * one.dynamic
    told = (
        f"launch {one.kernel.entry} {sha} grid {one.grid} block {rule['block']} shared {rule.get('shared', 0)} rest 1"
    )
    assert launches(lines) == [f"{told} stream 77 : {' '.join(map(str, values))}"] * 3
    assert [line for line in lines if line.startswith("load")] == [f"load {sha} aligned 1"] * 2
    assert lines[-1] == "alive 0"


def test_the_stream_is_asked_for_where_inductor_does_not_give_it(tmp_path: Path) -> None:
    """Inductor declares it once, for its own launches, which may come later."""

    class Wrapper:
        def __init__(self) -> None:
            self.header, self.prefix, self.lines = Text(), Text(), list[str]()

        def writeline(self, line: str) -> None:
            self.lines.append(line)

    class Text(list[str]):
        def splice(self, text: str) -> None:
            self.append(text)

    wrapper = Wrapper()
    call = call_of(built())
    for ahead in (False, False, True):
        write_call(wrapper, call.text(), "softmax", ["&x", "&y"], 2, ahead_of_time=ahead)
    name = "autotune_softmax_0"
    assert wrapper.lines[:2] == [f"{name}(2, autotune_stream(2), &x, &y);"] * 2
    assert wrapper.lines[2] == f"{name}(this->device_idx_, stream, &x, &y);"
    assert len(wrapper.prefix) == len(wrapper.header) == 1
    (line,) = launches(ran(tmp_path, [call], f"{TENSORS} {wrapper.lines[0]}"))
    assert " stream 502 :" in line


def test_a_misaligned_input_is_copied_where_vector_loads_read_it(tmp_path: Path) -> None:
    call = call_of(built())
    assert prepared(call).aligned[0] > 4
    lines = ran(tmp_path, [call], f"{TENSORS} f0(0, stream, &odd, &y);")
    assert f"clone {0x10004}" in lines
    (line,) = launches(lines)
    assert str(0x900000) in line.split(":")[1].split()
    assert str(0x10004) not in line
    assert lines[-1] == "alive 0", "the copy was given back"


def test_kernels_of_a_plan_hand_scratch_on(tmp_path: Path) -> None:
    call = call_of(cut())
    made = prepared(call)
    assert len(made.launches) > 1
    assert made.scratch
    lines = ran(tmp_path, [call], f"{TENSORS} f0(3, stream, &x, &y);")
    told = [line for line in lines if line.startswith("empty")]
    assert told == [f"empty {n} of 6 on 1:3 dense 1" for dtype, n in made.scratch]
    addresses = [0x10000, 0x80000, *(0x900000 + 0x1000 * k for k in range(len(made.scratch)))]
    for line, one in zip(launches(lines), made.launches, strict=True):
        values = [addresses[p] for p in one.pointers] + [one.extent0] * one.dynamic
        assert line.split(":")[1].split() == [str(v) for v in values]
    assert lines[-1] == "alive 0"


def test_equal_regions_share_functions_and_equal_cubins_stand_once(tmp_path: Path) -> None:
    first = call_of(built())
    written = RegionCpp()
    name, text = written.function(first.text(), "softmax")
    assert written.function(first.text(), "softmax") == (name, "")
    other, more = written.function(replace(first, label="another").text(), "softmax")
    assert other != name
    assert text.count("char autotune_cubin_") == 1
    assert "autotune_cubin_" not in more


def test_more_shared_memory_than_usual_is_asked_for(tmp_path: Path) -> None:
    def greedy(kernel: Kernel) -> Kernel:
        return replace(kernel, launch={**kernel.launch, "shared": 100_000})

    call = call_of(built(), greedy)
    (one,) = prepared(call).launches
    lines = ran(tmp_path, [call], f"{TENSORS} f0(0, stream, &x, &y);")
    assert f"shared {one.kernel.entry} 100000" in lines


def test_a_refusal_of_the_driver_is_an_error_that_names_the_kernel(tmp_path: Path) -> None:
    call = call_of(built())
    (one,) = prepared(call).launches
    body = """
      f0(0, stream, &x, &y);
      refused = 700;
      try { f0(0, stream, &odd, &y); } catch (const std::runtime_error& error) { std::printf("%s\\n", error.what()); }
    """
    lines = ran(tmp_path, [call], TENSORS + body)
    assert f"autotune: launching {one.kernel.entry}: as the test wants it (CUDA error 700)" in lines
    assert lines[-1] == "alive 0"


def test_any_bytes_are_a_literal(tmp_path: Path) -> None:
    data = bytes(range(256)) + b"\x00123\x07\x0089??/\\\"'" + bytes([0, 255] * 40)
    lines = literal(data)
    assert not any("'" in line or "?" in line for line in lines), "Inductor's code is a raw string in ''' of Python"
    source, binary = tmp_path / "bytes.cpp", tmp_path / "bytes"
    source.write_text("#include <cstdio>\nstatic const char data[] =\n" + "\n".join(lines) + ";\n"
                      "int main() { fwrite(data, 1, sizeof(data) - 1, stdout); }\n")  # fmt: skip
    subprocess.run(["g++", "-o", str(binary), str(source)], check=True)
    assert subprocess.run([binary], check=True, capture_output=True).stdout == data


def test_region_cpp_refuses_features_of_the_python_call() -> None:
    call = call_of(built())
    prepared(call)
    for fields, why in (
        ({"device": "cpu"}, "CPU kernels"),
        ({"symbols": {"s0": (0, 0)}}, "known at run time"),
        ({"verify": "first"}, "verified"),
    ):
        with pytest.raises(Unsupported, match=why):
            prepared(replace(call, **fields))
    empty = call_of(built(), lambda kernel: replace(kernel, code=b""))
    with pytest.raises(Unsupported, match="has no code"):
        prepared(empty)


@pytest.mark.parametrize("entry", ["", "a b", 'a"b', "a\\", "'''; import os; '''", "a\n", "naïve"])
def test_a_name_that_would_write_more_than_a_name_is_refused(entry: str) -> None:
    """A database names the kernels of its cubins; Inductor puts the C++ into a string of Python."""
    call = call_of(built(), lambda kernel: replace(kernel, entry=entry))
    with pytest.raises(Unsupported, match="name is not valid"):
        prepared(call)


def test_an_unproven_schedule_is_left_to_python_which_verifies_it() -> None:
    call = call_of(built())
    task, config, artifact = built()
    schedule = Schedule(KEY, config, 10.0, {}, artifact, "autotune", task.workload.family, task.workload.extent)
    use(Deployment())
    deployment().keep_match("cuda:0", Match(Level.PACKAGED, schedule, task.workload))
    with pytest.raises(Unsupported, match="verified"):
        prepared(call)


def _cuda_headers() -> list[Path]:
    """The folders of the toolkit's headers, or those of the wheels: Triton's has ``crt``, which torch's lack."""
    packages = Path(torch.__file__).parents[1]
    wheels = packages / "nvidia" / "cu13" / "include"
    toolkit = [Path("/usr/local/cuda/include")]
    for folders in toolkit, [wheels, wheels / "cccl", packages / "triton" / "backends" / "nvidia" / "include"]:
        if all(any((f / name).exists() for f in folders) for name in ("cuda_runtime_api.h", "crt/host_defines.h")):
            return folders
    pytest.skip("neither the CUDA toolkit nor Triton is installed")


@pytest.mark.slow
def test_the_text_compiles_with_torchs_own_headers(tmp_path: Path) -> None:
    headers = _cuda_headers()
    written = RegionCpp()
    _, text = written.function(call_of(built()).text(), "softmax")
    source = tmp_path / "real.cpp"
    header = f"#include <torch/csrc/inductor/aoti_include/cuda.h>\n{INCLUDES}"
    source.write_text(f"{header}namespace torch::aot_inductor {{\n{text}}}\n")
    include = Path(torch.__file__).parent / "include"
    where = [f"-I{folder}" for folder in (include, include / "torch/csrc/api/include", *headers)]
    subprocess.run(["g++", "-std=c++20", "-DUSE_CUDA", "-fsyntax-only", *where, str(source)], check=True)
