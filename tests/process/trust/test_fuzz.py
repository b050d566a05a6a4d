"""A sample of the mutated files of ``python -m tests.fuzz``."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.check import Fuzz, Tally


def test_a_sample_of_mutated_files(tmp_path: Path) -> None:
    fuzz, tally = Fuzz(tmp_path.resolve()), Tally()
    for seed in range(80):
        fuzz.case(seed, tally)
    # On a loaded machine a case may take its second; that is for the whole run to say.
    assert [f for f in tally.faults if " took " not in f] == []
    kinds = {name.partition(":")[0] for name in tally.outcomes}
    assert len(kinds) == 6
    assert any(name.endswith("refused") for name in tally.outcomes)
    assert any(name.endswith("found") for name in tally.outcomes)


def test_guard_detects_forbidden_actions_of_a_look_up(tmp_path: Path) -> None:
    """The check can fail: what a hostile file might bring about is seen."""
    import subprocess

    from tests.fuzz.check import Guard

    guard = Guard(tmp_path)
    guard.armed = True
    try:
        subprocess.run(["true"], check=True)
        (tmp_path.parent / f"{tmp_path.name}-outside").write_text("x")
        (tmp_path / "inside").write_text("x")
    finally:
        guard.armed = False
    assert {"subprocess.Popen", "open"} <= {seen.split(" ")[0] for seen in guard.seen}
    assert any("-outside" in seen for seen in guard.seen)
    assert not any("inside" in seen for seen in guard.seen)
