"""Counts and figures that documents state in sentences; tables have a test of their own."""

from __future__ import annotations

import re
import statistics
from typing import Any

import pytest

from autotune.domains.c3 import scenario
from autotune.in_program import contest
from benchmarks.form import RESULTS, read
from benchmarks.fusion.suite import CASES
from benchmarks.user_programs.known import PROGRAMS
from benchmarks.user_programs.step_table import gain
from tests.support import ROOT


def _text(name: str) -> str:
    return (ROOT / name).read_text()


def _lines(*names: str) -> int:
    files = [
        file for name in names for file in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).glob("*.py"))
    ]
    return sum(file.read_text().count("\n") for file in files)


SCENARIOS = len(scenario.named_scenarios())
MODELS = len(read(RESULTS / "h200/real_models.json")["cases"])


@pytest.mark.parametrize(
    ("document", "pattern", "count"),
    [
        ("docs/explanation/benchmarks.md", r"The suite has (\d+) cases", len(CASES)),
        ("docs/how-to/search.md", r"a suite of (\d+) cases", len(CASES)),
        ("docs/explanation/benchmarks.md", r"The suite has (\d+) scenarios", SCENARIOS),
        ("docs/how-to/overlap.md", r"--list +# (\d+) scenarios", SCENARIOS),
        ("docs/explanation/benchmarks.md", r"measures (\d+) programs as their users", len(PROGRAMS)),
        ("docs/explanation/benchmarks.md", r"The benchmark's (\d+) models", MODELS),
        ("README.md", r"(\d+) models of transformers and timm", MODELS),
    ],
)
def test_counts(document: str, pattern: str, count: int) -> None:
    assert [int(n) for n in re.findall(pattern, _text(document))] == [count]


@pytest.mark.parametrize(
    ("pattern", "lines"),
    [
        (r"whole kernel in (\d+) lines", _lines("autotune/compiler/targets/cuda/rows/flat.py")),
        (r"is a domain in (\d+) lines", _lines("examples/blocked_gelu")),
        (r"is an example in (\d+) lines", _lines("examples/triton_target")),
    ],
)
def test_sizes_of_examples_are_about_right(pattern: str, lines: int) -> None:
    (said,) = re.findall(pattern, _text("docs/how-to/extending.md"))
    assert int(said) == pytest.approx(lines, rel=0.1)


def test_documents_agree_on_the_steps_of_a_comparison() -> None:
    steps = 2 * (contest.WARM + contest.BLOCK * contest.ROUNDS)
    files = [
        ROOT / "docs/pictures/first-step.svg",
        *(ROOT / "docs/how-to").glob("*.md"),
        ROOT / "docs/tutorials/gpu.md",
    ]
    pattern = (
        r"[Nn]ext (\d+) steps|[Aa]fter (\d+) steps|takes (\d+) calls|, (\d+) steps in all|first (\d+) steps alternate"
    )
    said = [int("".join(groups)) for file in files for groups in re.findall(pattern, file.read_text())]
    assert len(said) >= 6
    assert {*said} == {steps}
    most = 2 * (contest.WARM + contest.BLOCK * contest.ROUNDS * contest.MOST_STEPS)
    short = [int(n) for file in (*files, ROOT / "README.md") for n in re.findall(r"up to (\d{3})\b", file.read_text())]
    assert len(short) >= 5
    assert {*short} == {most}


def test_the_tutorial_shows_lines_and_figures_of_a_search_that_ran() -> None:
    tutorial = _text("docs/tutorials/gpu.md")
    cases = {case["name"]: case for case in read(RESULTS / "h200/user_programs.json")["cases"]}
    gpt = cases["gpt_train"]
    figures = f"took {gpt['compile_ms']:.1f} ms a step by torch.compile and {gpt['search_ms']:.1f} ms by autotune"
    assert figures in " ".join(tutorial.split())

    def form(line: str) -> str:
        line = line.replace("(median ratio ", "(")  # the runs are older than these words
        return re.sub(r"[\d.]+", "N", re.sub(r"stored in \S+", "stored in", line))

    printed = {form(line) for case in cases.values() for line in case["contenders"]["search"].get("told", ())}
    shown = re.findall(r"^autotune: (.*)$", tutorial, re.MULTILINE)
    assert len(shown) >= 5
    assert [line for line in shown if form(line) not in printed] == []


def _graph_gain(case: dict[str, Any]) -> str:
    """The gain of whole steps as CUDA graphs."""
    plain, searched = (case["contenders"][name]["graph_ms"] for name in ("compile", "search"))
    return f"{plain / searched:.2f}x"


def test_figures_of_the_readme_are_those_of_the_files() -> None:
    readme = _text("README.md")
    masks = {case["name"]: case["launched_ratio"] for case in read(RESULTS / "h200/masks.json")["cases"]}
    qwen, llama = (f"{masks[f'{name} right']:.2f}x" for name in ("qwen3_0.6b", "llama_1b"))
    assert f"Qwen 3 of 0.6B {qwen}, Llama of 1B {llama}" in readme
    bert = sorted(masks[f"bert_large {kind}"] for kind in ("ones", "right"))
    assert f"BERT-large was {bert[0]:.2f} to {bert[1]:.2f} times as fast" in readme
    (layers,) = (case for case in read(RESULTS / "h200x4/fsdp.json")["cases"] if case["name"] == "70b 2048")
    assert f"on four H200s: {layers['stock_us'] / layers['autotune_us']:.2f}x" in readme
    programs = {case["name"]: case for case in read(RESULTS / "h200/user_programs.json")["cases"]}
    assert f"the gain over that is {39.7 / programs['volumes_train']['search_ms']:.2f}x" in readme
    (swin,) = read(RESULTS / "h200/user_programs_graph.json")["cases"]
    assert f"as one CUDA graph they gain {_graph_gain(programs['t5_train'])} and {_graph_gain(swin)}" in readme
    second = {case["name"]: f"{gain(case):.2f}x" for case in read(RESULTS / "h200/held_out_second.json")["cases"]}
    unet, experts, rays = (second.pop(f"{name}_train") for name in ("segmentation", "moe", "nerf"))
    assert f"three have rounds so far: a 2D U-Net {unet}, a mixture of experts {experts} and NeRF {rays}." in readme
    assert not second
    (points,) = read(RESULTS / "h200/user_programs_max_autotune.json")["cases"]
    assert points["mode"] == "max-autotune"
    assert f"one program was measured: PointNet gains {gain(points):.2f}x." in re.sub(
        r"\[([^]]*)\]\([^)]*\)", r"\1", readme
    )
    ratio = re.search(
        r"short convolutions.*median ratio ([\d.]+)x", _text("benchmarks/results/h200/small_programs.txt"), re.S
    )
    assert ratio
    assert f"short depthwise convolutions, as Mamba and LFM2 have, gained {float(ratio[1]):.2f}x" in readme
    further = {case["name"]: case for case in read(RESULTS / "h200/held_out.json")["cases"]}
    gained = {
        "An image decoder gained": "decoder_infer", "wav2vec 2.0": "wav2vec2_train", "ModernBERT": "modernbert_train",
        "PointNet": "pointnet_train", "DeBERTa": "deberta_train", "a vocoder": "vocoder_train", "DLRM": "dlrm_train",
        "Gemma 3": "gemma3_train", "CLIP": "clip_train", "a low-rank fine-tuning": "lora_train",
    }  # fmt: skip
    assert set(gained.values()) == set(further)
    for text, name in gained.items():
        assert f"{text} {gain(further[name]):.2f}x" in readme
    mean = statistics.geometric_mean(gain(case) for case in further.values())
    assert re.search(rf"have rounds: {mean:.2f}x in the\s+geometric mean", readme)
    after = {case["name"]: gain(case) for case in read(RESULTS / "h200/held_out_after.json")["cases"]}
    text = f"DeBERTa gains {after['deberta_train']:.2f}x, PointNet {after['pointnet_train']:.2f}x"
    assert f"{text} and the low-rank fine-tuning {after['lora_train']:.2f}x" in " ".join(readme.split())
    means = re.findall(
        r"over torch.compile(?:, default| with attention rewritten): (\d\.\d+)x",
        _text("docs/explanation/benchmarks.md"),
    )
    whole, kernels = (f"{float(mean):.2f}x" for mean in means)
    assert f"{whole} in the geometric mean" in readme
    assert re.search(rf"kernels and convolutions\s+are {kernels}", readme)
