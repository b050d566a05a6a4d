"""Which file systems several machines share: there a file is no memory that all its writers see alike."""

from __future__ import annotations

import re
from pathlib import Path

MOUNTS = Path("/proc/self/mounts")

SHARED = frozenset({
    "nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs",
    "glusterfs", "orangefs", "pvfs2", "ocfs2", "gfs2", "ncpfs", "virtiofs", "vboxsf", "wekafs", "quobyte", "panfs",
})  # fmt: skip
"""Types of file systems that other machines may write, as the kernel names them."""

SHARED_PROGRAMS = frozenset({
    "sshfs", "s3fs", "gcsfuse", "goofys", "rclone", "glusterfs", "ceph", "ceph-fuse", "juicefs", "mfs", "moosefs",
    "lizardfs", "seaweedfs", "blobfuse", "blobfuse2", "davfs", "mount-s3", "smbnetfs", "curlftpfs", "beegfs",
    "quobyte", "hdfs", "alluxio",
})  # fmt: skip
"""Of those that a FUSE program serves (``fuse.sshfs``) such as do."""
_ESCAPE = re.compile(r"\\([0-7]{3})")


def shared_type(path: Path) -> str | None:
    """The type of the file system that ``path`` (or the nearest folder that is there) lies on, where other machines may
    write it, else None; None too where the kernel does not list what is mounted."""
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
        real = path.resolve()
    except (OSError, RuntimeError):
        return None
    longest, found = -1, ""
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(_ESCAPE.sub(lambda m: chr(int(m[1], 8)), fields[1]))
        # What is mounted later at the same place hides what was there.
        if len(point.parts) >= longest and real.is_relative_to(point):
            longest, found = len(point.parts), fields[2]
    kind, _, program = found.partition(".")
    shared = program in SHARED_PROGRAMS if kind == "fuse" else found in SHARED
    return found if shared else None
