"""The benchmark of clocks during steps: its output, and its refusals."""

from __future__ import annotations

import pytest

from benchmarks import sustained


def test_a_case_prints_each_lead_and_the_clock() -> None:
    row = {"compile_us": 70_000.0, "autotune_us": 60_000.0, "speedup": 70 / 60}
    later = {"compile_us": 70_000.0, "autotune_us": 64_000.0, "speedup": 70 / 64}
    both = {"compile": {"us": 71_000.0, "mhz": 1900, "watt": 600.0}, "autotune": {"us": 66_000.0, "mhz": 1700}}
    case = {"name": "vit", "leads": {"0.0": row, "0.3": later}, "alone": both}
    told = "vit: 0.0 s 1.167x, 0.3 s 1.094x, alone 1.076x; compile 1900 MHz 600.0 W, autotune 1700 MHz None W"
    assert sustained.line(case) == told


def test_a_cpu_has_no_clock_to_ask_about(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sustained.main(["--models", "vit_base_train", "--db", "real.db", "--out", "x.json", "--device", "cpu"])
    assert ended.value.code == 2
    assert "--device cpu: only a GPU's clock is asked about; name cuda:N" in capsys.readouterr().err
