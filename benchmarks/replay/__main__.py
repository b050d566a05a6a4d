"""Record search spaces whole, and search the recordings again without a device.

python -m benchmarks.replay record 'layer_norm f32 2048x1024' --space narrow.toml --out recordings
python -m benchmarks.replay search recordings --sampler tpe,random --seeds 30
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from autotune.cli import app
from benchmarks.replay import record, regret


def build_parser() -> argparse.ArgumentParser:
    """The parser of both commands."""
    parser = app.Parser(prog="python -m benchmarks.replay", description=(__doc__ or "").partition("\n")[0])
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (record, regret):
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; exit codes and errors are those of ``autotune``."""
    return app.main(argv, build_parser)


if __name__ == "__main__":
    raise SystemExit(main())
