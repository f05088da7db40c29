"""Confinement of the sandbox's processes by themselves: a root directory of their own first, then limits, Landlock and seccomp.

The former is done once, by the process that all programs are forked from; the latter in each of them, just before it reads
its program. Where the kernel refuses one layer, OSError says which. Standard library only.
"""

import os
import resource
import signal
import sys
from dataclasses import dataclass

from covey.sandbox import kernel, seccomp

LAYERS = ("namespaces", "landlock", "seccomp")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_NOBODY = 65534
_FIRST_USER = 1_879_000_000
"""Root's programs run as users above this number, which no account has: limits on processes do not count for root."""
_OPEN_FILES, _PROCESSES = 256, 64


@dataclass(frozen=True)
class Limits:
    """Resource limits of one program: CPU seconds, and MiB of memory, of one file, and of its scratch folder."""

    cpu_seconds: int = 10
    memory_mb: int = 256
    file_mb: int = 16


def library() -> str:
    """The folder of the standard library, all that a program gets to see of this machine's disk."""
    return os.path.realpath(os.path.dirname(os.__file__))


def new_namespaces(slot: int) -> None:
    """Fork into new namespaces as PID 1 (user, mount, process, network, IPC, host name), in a root directory
    that holds the standard library, four devices and an empty /tmp.

    The caller is left behind as this process's parent and ends with it. Raises OSError when the kernel refuses.
    """
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    process = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    privileged = os.getuid() == 0 and _unshared(flags)
    if not privileged:
        user, group = os.getuid(), os.getgid()
        kernel.unshare(kernel.CLONE_NEWUSER | flags)
        _map(process, "self", user, group)
    _build_root()
    here, there = os.pipe(), os.pipe()
    child = os.fork()
    if child:
        os.close(here[1])
        os.close(there[0])
        _stay_behind(child, process, here[0], there[1], _FIRST_USER + slot if privileged else None)
    for descriptor in (process, here[0], there[1]):
        os.close(descriptor)
    if privileged:
        become(_FIRST_USER + slot)
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
    os.write(here[1], b".")
    if os.read(there[0], 1) != b".":
        os._exit(1)
    kernel.die_with_parent()
    os.close(here[1])
    os.close(there[0])


def become(user: int) -> None:
    """Give up root for a user that owns nothing."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    kernel.control(kernel.PR_SET_DUMPABLE, 1)


def _unshared(flags: int) -> bool:
    try:
        kernel.unshare(flags)
    except OSError:  # root of a container that has no right to: it may still have one to user namespaces
        return False
    return True


def _map(process: int, name: str, user: int, group: int) -> None:
    """Maps this process's user and group to `nobody` inside the namespace."""
    for file, text in (("setgroups", "deny"), ("uid_map", f"{_NOBODY} {user} 1"), ("gid_map", f"{_NOBODY} {group} 1")):
        descriptor = os.open(f"{name}/{file}", os.O_WRONLY, dir_fd=process)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def _stay_behind(child: int, process: int, ready: int, go_on: int, user: int | None) -> None:
    """The parent's part: name the child's user for it, then wait for its end. Never returns."""
    try:
        if os.read(ready, 1) == b".":  # nothing is read when the child has died
            if user is not None:
                _map(process, str(child), user, user)
            os.write(go_on, b".")
        os.closerange(0, 1024)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    finally:
        os._exit(1)


def _build_root() -> None:
    shown = library()
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", "/tmp", "tmpfs", flags, "size=1m,mode=755")
    os.mkdir("/tmp/old")
    kernel.pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    os.mkdir("/new")
    kernel.mount("tmpfs", "/new", "tmpfs", flags, "size=1m,mode=755")
    os.makedirs("/new" + shown)
    kernel.bind_read_only("/old" + shown, "/new" + shown)
    for name in ("site-packages", "dist-packages"):  # third-party packages are not the standard library
        if os.path.isdir(f"/new{shown}/{name}"):
            kernel.mount("tmpfs", f"/new{shown}/{name}", "tmpfs", flags | kernel.MS_RDONLY, "size=4k,mode=755")
    os.mkdir("/new/dev")
    for device in _DEVICES:
        os.close(os.open("/new" + device, os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.mount("/old" + device, "/new" + device, None, kernel.MS_BIND)
    os.mkdir("/new/tmp")
    kernel.unmount("/old")
    os.chdir("/new")
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    kernel.mount("none", "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | flags)


def confine(layers: tuple[str, ...], limits: Limits) -> None:
    """Lock this process in for good: a scratch folder that ends with it, limits, no privileges, then the `layers` in force."""
    os.setsid()
    if "namespaces" in layers:
        kernel.unshare(kernel.CLONE_NEWNS)
        options = f"size={limits.file_mb}m,nr_inodes=1024,mode=777"
        kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        os.chdir("/tmp")
    _limit(limits, "namespaces" in layers or os.getuid() > _FIRST_USER)
    if sys.platform != "linux" or not layers:
        return
    kernel.drop_capabilities()
    if "landlock" in layers:
        _landlock("namespaces" in layers)
    if "namespaces" not in layers:
        kernel.die_with_parent()
        os.chdir("/")
    kernel.control(kernel.PR_SET_DUMPABLE, 0)
    if "seccomp" in layers:
        seccomp.restrict()


def _landlock(has_root: bool) -> None:
    devices = [device for device in _DEVICES if os.path.exists(device)]
    kernel.landlock([library(), *(["/"] if has_root else [])], [*devices, *(["/tmp"] if has_root else [])])


def _limit(limits: Limits, has_user: bool) -> None:
    mebibyte = 2**20
    memory = _virtual_memory() + limits.memory_mb * mebibyte
    values = {
        "RLIMIT_AS": memory,
        "RLIMIT_CPU": limits.cpu_seconds,
        "RLIMIT_FSIZE": limits.file_mb * mebibyte,
        "RLIMIT_NOFILE": _OPEN_FILES,
        "RLIMIT_NPROC": _PROCESSES,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_SIGPENDING": 256,
    }
    for name, value in values.items():
        number = getattr(resource, name, {"RLIMIT_SIGPENDING": 11}.get(name) if sys.platform == "linux" else None)
        if number is None:
            continue
        hard = resource.getrlimit(number)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        if name != "RLIMIT_NPROC" or has_user:  # it counts a user's processes: the run's own too
            above = int(name == "RLIMIT_CPU" and limit != hard)  # the first limit is a signal, the second SIGKILL
            resource.setrlimit(number, (limit, limit + above))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # too large a file is an OSError, not the end


def _virtual_memory() -> int:
    """Bytes of address space that the interpreter itself has already."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # no /proc in the sandbox's own root: measured before, see `measured`
        return measured


measured = 128 * 2**20
"""Bytes of address space of the process that programs are forked from, set by it before it loses sight of /proc."""
