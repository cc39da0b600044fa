"""Permissions of a file or folder that is replaced, kept for the new one."""

from __future__ import annotations

import contextlib
import os
import stat

ACLS = ("system.posix_acl_access", "system.posix_acl_default")
"""Extended attributes in which Linux keeps access control lists (acl(5))."""


def keep_permissions(new: int | str, old: str) -> None:
    """Give `new` the owner, group, permissions and access control lists of `old`, as far as this user may.

    Only root may give a file to another user, and only members may give it to a group. Where the group can't
    be kept, the new file's group gets no more than everyone had.

    Args:
        new: a file or folder of this user's, by path or open descriptor.
        old: the path of what it replaces.

    Raises:
        OSError: `old` does not exist, or the permissions can't be set.
    """
    facts = os.stat(old)
    mode = stat.S_IMODE(facts.st_mode)
    if not _keep_owner(new, facts):
        mode &= ~stat.S_ISUID
    is_grouped = os.stat(new).st_gid == facts.st_gid
    if not (is_grouped and _keep_acls(new, old)):
        mode = _without_group(mode)
        _drop_acls(new)
    try:
        os.chmod(new, mode)
    except PermissionError:  # a file system without permissions of its own, such as FAT
        if stat.S_IMODE(os.stat(new).st_mode) & ~mode:
            raise


def _keep_owner(new: int | str, facts: os.stat_result) -> bool:
    """Give a file its owner and group, or only its group; return whether it has the owner."""
    for uid in (facts.st_uid, -1):
        with contextlib.suppress(OSError):  # not allowed, or unknown in this container
            os.chown(new, uid, facts.st_gid)
            break
    return os.stat(new).st_uid == facts.st_uid


def _keep_acls(new: int | str, old: str) -> bool:
    """Copy the access control lists, or the lack of them; return whether that was possible."""
    _drop_acls(new)
    for name in ACLS if hasattr(os, "getxattr") else ():
        try:
            value = os.getxattr(old, name)
        except OSError:  # it has none, or the file system knows none
            continue
        try:
            os.setxattr(new, name, value)
        except OSError:
            return False
    return True


def _drop_acls(new: int | str) -> None:
    """Remove lists, such as those that the folder gave to a file created in it."""
    for name in ACLS if hasattr(os, "removexattr") else ():
        with contextlib.suppress(OSError):  # it has none
            os.removexattr(new, name)


def _without_group(mode: int) -> int:
    """Return permissions in which the group has no more than everyone."""
    everyone = mode & stat.S_IRWXO
    return mode & ~(stat.S_IRWXG | stat.S_ISGID) | (mode & everyone << 3)
