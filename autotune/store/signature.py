"""Signatures of snapshots: Ed25519, by the package ``cryptography``.

A deployment pins a public key, which cannot sign. A keyed hash would need no package, but every machine that checks it
could forge it, and a fleet has many.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import UserError
from autotune.store.snapshot_form import Seal

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_LARGEST_KEY = 64 << 10
_HOW = "`openssl genpkey -algorithm ed25519 -out KEY` makes one, `openssl pkey -in KEY -pubout` its public half"


def signed(seal: Seal, key: str | os.PathLike[str]) -> Seal:
    """``seal`` with a signature.

    Args:
        key: file of a private Ed25519 key, PEM, without a passphrase.

    Raises:
        UserError: invalid or unreadable key, or the package is not installed.
    """
    private = private_key(key)
    return replace(seal, key=_name(private.public_key()), signature=private.sign(seal.message()))


def private_key(key: str | os.PathLike[str]) -> Ed25519PrivateKey:
    """A private key for signing; raises UserError as :func:`signed`."""
    serialization, ed25519 = _cryptography()
    try:
        found = serialization.load_pem_private_key(_read(key), password=None)
    except (ValueError, TypeError):  # TypeError: it has a passphrase
        found = None
    if not isinstance(found, ed25519.Ed25519PrivateKey):
        raise UserError(f"{os.fspath(key)} is not a private Ed25519 key in PEM without a passphrase: {_HOW}")
    private: Ed25519PrivateKey = found
    return private


def check_signature(path: Path, seal: Seal, key: str | os.PathLike[str]) -> None:
    """Check that a snapshot's seal is signed by the owner of ``key``, without reading the pages.

    Args:
        key: file of a public Ed25519 key, PEM; or the text of one.

    Raises:
        UserError: not signed, signed with another key, invalid ``key``, or the package is not installed.
    """
    serialization, ed25519 = _cryptography()
    from cryptography.exceptions import InvalidSignature

    text = os.fspath(key)
    data = text.encode() if text.startswith("-----BEGIN") else _read(key)
    try:
        public = serialization.load_pem_public_key(data)
    except ValueError:
        public = None
    if not isinstance(public, ed25519.Ed25519PublicKey):
        raise UserError(f"the key for snapshots is not a public Ed25519 key in PEM: {_HOW}")
    if not seal.signed:
        raise UserError(f"the snapshot {path} is not signed, but a key requires it: export it with --sign KEYFILE")
    if seal.key != _name(public):
        raise UserError(f"the snapshot {path} is not used: it is signed with another key")
    try:
        public.verify(seal.signature, seal.message())
    except InvalidSignature:
        raise UserError(f"the snapshot {path} is not used: its signature is wrong") from None


def _name(public: Ed25519PublicKey) -> bytes:
    return hashlib.sha256(public.public_bytes_raw()).digest()


def _read(key: str | os.PathLike[str]) -> bytes:
    try:
        with open(key, "rb") as file:
            return file.read(_LARGEST_KEY)
    except (OSError, ValueError) as e:
        raise UserError(f"cannot read the key {os.fspath(key)}: {getattr(e, 'strerror', None) or e}") from None


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise UserError("signatures need the package cryptography: run `pip install 'autotune-torch[sign]'`") from None
    return serialization, ed25519
