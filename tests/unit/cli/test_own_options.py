"""A domain's own options: its help has them and no other's, and other domains' command lines reject them."""

from __future__ import annotations

import pytest

from autotune.cli.app import build_parser, main
from autotune.cli.options import every_domain

OWN = {
    "fusion": ("--train", "--rows", "--plans", "--caches", "--precision", "--no-step"),
    "c3": ("--gemm", "--collective", "--ranks"),
    "kernel": ("--shapes",),
}
SHARED = ("--device", "--trials", "--missed", "--ray")


def helped(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("domain", OWN)
def test_the_help_of_a_search_has_the_options_of_its_domain_alone(
    domain: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = helped(capsys, "search", domain)
    for option in (*OWN[domain], *SHARED):
        assert option in text
    for other, options in OWN.items():
        for option in options:
            assert (f"{option} " in text) == (other == domain)


def test_the_help_without_a_domain_has_the_shared_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(capsys, "search")
    assert "autotune search DOMAIN --help" in text
    for option in SHARED:
        assert option in text
    for options in OWN.values():
        for option in options:
            assert f"{option} " not in text
    assert "--train" in helped(capsys, "compare")  # of one domain, which need not be named


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["search", "c3", "ag-equal-proj", "--train"], "--train"),
        (["search", "c3", "--gemm", "8x8x8", "--collective", "all_gather", "--bytes", "1KiB", "--caches=warm"],
         "--caches=warm"),
        (["search", "c3", "--gemm", "8x8x8", "--shapes=x"], "--shapes=x"),
        (["search", "kernel", "kernels:scale", "--train"], "--train"),
        (["search", "fusion", "layer_norm", "--bytes", "1MiB"], "--bytes 1MiB"),
        (["search", "--missed", "--ranks=2"], "--ranks=2"),
        (["lookup", "fusion", "layer_norm", "--ranks", "2"], "--ranks 2"),
        (["lookup", "fusion", "layer_norm", "--space", "f"], "--space f"),
    ],
)  # fmt: skip
def test_an_option_of_another_domain_is_unknown(
    words: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert (
        f"unrecognized arguments: {option} (see autotune {' '.join(w for w in words[:2] if w[0] != '-')} --help)" in err
    )


@pytest.mark.parametrize(
    ("words", "domain", "has"),
    [
        (["--missed"], None, "train"),  # the default domain's
        (["--missed", "kernel", "--shapes", "f"], "kernel", "shapes"),
        (["--device", "cpu", "c3", "--gemm", "1x1x1"], "c3", "gemm"),
        (["--gemm", "1x1x1", "c3"], "c3", "gemm"),
        (["--db", "c3", "fusion", "layer_norm", "--train"], "fusion", "train"),
        (["--db=c3", "kernel", "m:f"], "kernel", "shapes"),
        (["c3", "--compute", "kernel"], "c3", "gemm"),
    ],
)
def test_the_domain_is_found_wherever_it_is_named(words: list[str], domain: str | None, has: str) -> None:
    args = build_parser().parse_args(["search", *words])
    assert args.domain == domain
    assert [name for name in ("train", "gemm", "shapes") if hasattr(args, name)] == [has]


@pytest.mark.parametrize(
    "words",
    [["fusion", "layer_norm", "--train"], ["fusion", "--train", "layer_norm"], ["--train", "fusion", "layer_norm"]],
)
def test_the_target_is_found_wherever_it_is_named(words: list[str]) -> None:
    """Python 3.14's argparse takes it behind an option; earlier versions do not."""
    args = build_parser().parse_args(["search", *words])
    assert (args.domain, args.target, args.train) == ("fusion", "layer_norm", True)


def test_a_second_target_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["search", "fusion", "layer_norm", "--train", "softmax"])
    assert "unrecognized arguments: softmax (" in capsys.readouterr().err


def test_the_default_domain_comes_first() -> None:
    assert next(iter(every_domain())) == "fusion"
    assert {"c3", "kernel"} <= every_domain().keys()
