"""Linux kernel features with which a process locks itself in: namespaces, mounts, capabilities, Landlock.

Only the standard library is imported, and only inside the sandbox's own processes: `python -S` without a site-packages
must be able to run it. Every function raises OSError with the call's name when the kernel refuses.
"""

import ctypes
import os
import platform
import signal
import sys

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x0002_0000, 0x0400_0000, 0x0800_0000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x1000_0000, 0x2000_0000, 0x4000_0000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 15, 24, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

_NUMBERS = {"x86_64": {"pivot_root": 155, "capset": 126}, "aarch64": {"pivot_root": 41, "capset": 91}}
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEVICE = 1, 2, 4, 8, 1 << 14, 1 << 15
_RIGHTS_ON_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_libc = ctypes.CDLL(None, use_errno=True)


def machine() -> str:
    """`x86_64`, `aarch64`, or another name for which no numbers are known."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())


def _checked(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _system_call(name: str, *arguments: object) -> int:
    numbers = _NUMBERS.get(machine(), {})
    if sys.platform != "linux" or name not in numbers:
        raise OSError(38, f"{name}: not known on {sys.platform} {machine()}")
    return _checked(name, _libc.syscall(ctypes.c_long(numbers[name]), *arguments))


def unshare(flags: int) -> None:
    """Leave the namespaces that `flags` names for new ones."""
    if sys.platform != "linux":
        raise OSError(38, "unshare: only Linux has namespaces")
    _checked("unshare", _libc.unshare(ctypes.c_int(flags)))


def mount(source: str, target: str, kind: str | None, flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    _checked("mount", _libc.mount(*words, ctypes.c_ulong(flags), options.encode()))


def unmount(target: str) -> None:
    """Take the file system at `target`, and all below it, out of sight."""
    _checked("umount2", _libc.umount2(os.fsencode(target), MNT_DETACH))


def bind_read_only(source: str, target: str) -> None:
    """Show `source` at `target`, where nothing can be written, no device opened and no set-uid bit counts."""
    mount(source, target, None, MS_BIND | MS_REC)
    flags = os.statvfs(target).f_flag & 0x7FFF & ~MS_REMOUNT  # flags that an outer namespace has locked must stay
    locked = flags & (MS_NOSUID | MS_NODEV | 8 | 1024 | 2048)  # 8 noexec, 1024 noatime, 2048 nodiratime
    mount("none", target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | locked)


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root directory of this mount namespace and put the former one at `old`."""
    _system_call("pivot_root", os.fsencode(new), os.fsencode(old))


def control(option: int, *arguments: int) -> None:
    """prctl(2)."""
    words = [ctypes.c_ulong(word) for word in (*arguments, 0, 0, 0, 0)[:4]]
    _checked("prctl", _libc.prctl(ctypes.c_int(option), *words))


def die_with_parent() -> None:
    """Be killed when the process that started this one ends, however it ends."""
    control(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def drop_capabilities() -> None:
    """Give up every privilege of this process for good, and forbid that an exec brings any back."""
    control(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(64):
        try:
            control(PR_CAPBSET_DROP, capability)
        except OSError:  # this kernel has no more of them, or the process may not: the capset below is what counts
            break
    header = (ctypes.c_uint32 * 2)(0x2008_0522, 0)  # version 3, this thread
    _system_call("capset", header, (ctypes.c_uint32 * 6)())
    control(PR_SET_NO_NEW_PRIVS, 1)


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def landlock_version() -> int:
    """ABI version of the kernel's Landlock, 0 where it has none. <https://docs.kernel.org/userspace-api/landlock.html>"""
    if sys.platform != "linux" or machine() not in _NUMBERS:
        return 0
    return max(0, int(_libc.syscall(ctypes.c_long(_LANDLOCK_CREATE), None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def landlock(readable: list[str], writable: list[str]) -> None:
    """Forbid every file but those below `readable` (to read) and `writable` (all but to run), and TCP altogether.

    From version 6 on, signals and abstract sockets stay inside too. Needs no_new_privs. Raises OSError where there is none.
    """
    version = landlock_version()
    if not version:
        raise OSError(38, "landlock: not in this kernel")
    files = (1 << (13 + sum(version >= needed for needed in (2, 3, 5)))) - 1  # refer, truncate and ioctl came later
    rules = _Ruleset(files, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = ctypes.sizeof(_Ruleset) if version >= 6 else 16 if version >= 4 else 8
    ruleset = _checked(
        "landlock",
        _libc.syscall(ctypes.c_long(_LANDLOCK_CREATE), ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint32(0)),
    )
    try:
        for path in readable:
            _allow(ruleset, path, (_READ_FILE | _READ_DIR | _EXECUTE) & files)
        for path in writable:
            _allow(ruleset, path, files & ~_EXECUTE)
        _checked(
            "landlock", _libc.syscall(ctypes.c_long(_LANDLOCK_RESTRICT), ctypes.c_int(ruleset), ctypes.c_uint32(0))
        )
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _Beneath(rights if os.path.isdir(path) else rights & _RIGHTS_ON_A_FILE, parent)
        _checked(
            "landlock",
            _libc.syscall(
                ctypes.c_long(_LANDLOCK_ADD), ctypes.c_int(ruleset), 1, ctypes.byref(rule), ctypes.c_uint32(0)
            ),
        )
    finally:
        os.close(parent)
