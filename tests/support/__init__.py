"""What tests of several layers share: graphs and programs, simulators of devices, databases, domains made of paper."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the repository
SOCKETS = "/tmp"
"""Where folders with sockets are made: TMPDIR may be too long for a socket's name, and closed to PostgreSQL's user."""
