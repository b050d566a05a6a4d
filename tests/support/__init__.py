"""Shared parts of tests of several layers: graphs and programs, simulators of devices, databases, test domains."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the repository
SOCKETS = "/tmp"
"""Where folders with sockets are made: TMPDIR may be too long for a socket's name, and closed to PostgreSQL's user."""
