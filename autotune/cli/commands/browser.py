"""``autotune report`` and ``autotune dashboard``: stored results in a browser."""

from __future__ import annotations

import argparse
import contextlib
import errno
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.options import add_db
from autotune.errors import UserError
from autotune.files import import_module
from autotune.words import plural

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from autotune.report.site import Page

HOST = "127.0.0.1"
PORT = 8080
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def add_parser(subparsers: Any) -> None:
    """Add both commands."""
    parser = subparsers.add_parser(
        "report",
        help="write an HTML report of a database",
        description="Write a folder of HTML pages that load nothing from other sites: an overview with a search field,"
        " and a page for each model, workload and scenario of a database, or of a folder with result files.",
    )
    source = parser.add_mutually_exclusive_group()
    add_db(source)
    about = "report result files (.json) of benchmarks/ in FOLDER and its subfolders"
    source.add_argument("--results", metavar="FOLDER", help=about)
    about = "folder to write: a new one, or an earlier report to replace (default: report)"
    parser.add_argument("-o", "--out", default="report", metavar="FOLDER", help=about)
    parser.add_argument("--title", metavar="TEXT", help="title of the overview (default: the name of the source)")
    parser.set_defaults(run=report)
    parser = subparsers.add_parser(
        "dashboard",
        help="serve optuna-dashboard for the stored searches",
        description=f"Serve optuna-dashboard on {HOST} until Ctrl-C. A study shows the measurements of one workload on"
        " one device, and is updated during a search. Changes made in the dashboard are not stored.",
    )
    about = f"port to listen on; 0 selects a free one (default: {PORT})"
    parser.add_argument("--port", type=_port, default=PORT, metavar="N", help=about)
    add_db(parser)
    parser.set_defaults(run=dashboard)


def report(args: argparse.Namespace) -> int:
    """Write the report; returns 0."""
    from autotune.report import site

    begin = time.monotonic()
    out = Path(args.out)
    site.check_folder(out)
    name, found = _source(args)
    pages = list(found)
    size = site.write(pages, out, args.title or f"autotune: {name}")
    took = time.monotonic() - begin
    print(
        f"{plural(len(pages), 'page')}, {size / 1e6:.1f} MB, in {took:.1f} s: open {out / 'index.html'}",
        file=sys.stderr,
    )
    return 0


def _source(args: argparse.Namespace) -> tuple[str, Iterator[Page]]:
    """The name of the report's source, and its pages."""
    if args.results:
        folder = Path(args.results)
        if not folder.is_dir():
            raise UserError(f"--results {folder}: no such folder")
        # The programs in benchmarks/ of a checkout write result files and build their pages.
        return folder.name, import_module("benchmarks.pages", "--results").pages(folder)
    from autotune.report import database
    from autotune.store import Store

    with Store.open(args.db, migrate=False, readonly=True) as store:
        # Reports are shared: they have the database's name without its path.
        return Path(store.name).stem, iter(list(database.pages(store)))


def _port(text: str) -> int:
    if text.isdecimal() and int(text) < 65536:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")


def dashboard(args: argparse.Namespace) -> int:
    """Serve until interrupted; returns 0."""
    from autotune.store import Store

    with Store.open(args.db, migrate=False, readonly=True) as store:
        try:
            from optuna_dashboard import wsgi
        except ImportError:
            install = "pip install 'autotune-torch[dashboard]'"
            raise UserError(f"the dashboard needs optuna-dashboard: run `{install}`") from None
        from autotune.tuner.studies import Studies

        application = local_only(wsgi(Studies(store)))
        try:
            server = _server(args.port, application)
        except OSError as error:
            why = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
            raise UserError(f"--port {args.port}: {why}: give another port, or 0 for a free one") from None
        with server:
            print(f"{store.name} at http://{HOST}:{server.server_port}/ (end with Ctrl-C)", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()
    return 0


def local_only(application: Application) -> Application:
    """Refuse requests with another host name, since another site's name may resolve to this host (DNS rebinding)."""

    def guarded(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        host = str(environ.get("HTTP_HOST", "")).rpartition(":")[0] or str(environ.get("HTTP_HOST", ""))
        if host not in (HOST, "localhost"):
            start("403 Forbidden", [("Content-Type", "text/plain")])
            return [f"open http://{HOST}\n".encode()]
        return application(environ, start)

    return guarded


def _server(port: int, application: Application) -> WSGIServer:
    """A server with a thread for each request and without a request log. Only this command imports its modules.

    Raises:
        OSError: the port cannot be opened.
    """
    from socketserver import ThreadingMixIn
    from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

    class Server(ThreadingMixIn, WSGIServer):
        daemon_threads = True

    class Quiet(WSGIRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    return make_server(HOST, port, application, server_class=Server, handler_class=Quiet)
