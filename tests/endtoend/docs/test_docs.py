"""The documentation: every block of the tutorial runs, and the site has no dead links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.blocks import blocks, run_page


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_block_of_the_tutorial_runs(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="the tutorial ends with a report")
    printed = run_page(ROOT / "docs/tutorials/cpu.md", tmp_path / "reader")
    assert len(printed) == 6
    assert "'hits': 1" in printed[4] or "hits=1" in printed[4]
    assert len(list((tmp_path / "reader" / "report" / "workloads").glob("*.html"))) >= 1


def test_a_block_that_fails_is_named(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```bash\ntrue\n```\n\n```bash\nfalse\n```\n")
    assert [b.line for b in blocks(page)] == [4, 8]
    with pytest.raises(AssertionError, match=r"page\.md:8: exit code 1"):
        run_page(page, tmp_path / "reader")
    page.write_text("```bash\ntrue\ntrue | false\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md:3: only a shell could run true \| false"):
        run_page(page, tmp_path / "other")


def built(docs: Path, out: Path) -> subprocess.CompletedProcess[str]:
    settings = (ROOT / "mkdocs.yml").read_text()
    settings = settings.replace("docs_dir: docs", f"docs_dir: {docs}").replace("build/docs", str(out))
    settings = settings.partition("not_in_nav:")[0].replace("scripts/docs_", str(ROOT / "scripts/docs_"))
    file = docs.parent / "mkdocs.yml"
    file.write_text(settings.replace("paths: [.]", f"paths: [{ROOT}]"))
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(file)],
        capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, timeout=550,
    )  # fmt: skip


def test_the_site_is_whole_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded = re.compile(r'<(?:script|link|img)[^>]*(?:src|href)="?(?:https?:)?//')
    texts = {str(file.relative_to(tmp_path / "site")): file.read_text() for file in (tmp_path / "site").rglob("*.html")}
    assert [name for name, text in texts.items() if loaded.search(text)] == []
    commands, decisions, python = (
        texts[f"{n}.html"] for n in ("reference/commands", "decisions/index", "reference/python")
    )
    assert all(word in commands for word in ("autotune db prune", "--matmul-precision", "autotune search c3", "--gemm"))
    assert all(f"{record.name[:3]}: " in decisions for record in (ROOT / "docs/decisions").glob("0*.md"))
    assert all(
        f'<h3 id="{target}"' in python
        for target in re.findall(r"::: (\S+)", (ROOT / "docs/reference/python.md").read_text())
    )
    assert not re.search(r":(?:func|class|mod):", "".join(texts.values())), "roles of Sphinx"


def test_dead_links_are_found(tmp_path: Path) -> None:
    """To a page, to a place in a page, and to a file of the repository."""
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# Title\n")
    assert built(docs, tmp_path / "site").returncode == 0
    dead = ["nowhere.md", "index.md#nothing", "../no/such/file.py"]
    (docs / "index.md").write_text("# Title\n\n" + "".join(f"[x]({link})\n" for link in dead))
    done = built(docs, tmp_path / "site")
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert len(told) == 3
    for name in ("nowhere.md", "#nothing", "no/such/file.py"):
        assert any(name in line for line in told), name
