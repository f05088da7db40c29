"""The system calls that model-written code may make: everything else is answered with "not permitted" by the kernel.

A list of what is allowed, not of what is forbidden, so that system calls of later kernels stay out until they are reviewed.
Not on it: sockets (but a pair of connected ones, which asyncio wants), fork, exec, signals to others, ptrace and its family,
mounts, namespaces, keys, BPF, io_uring, shared memory that no limit counts. Standard library only.
<https://docs.kernel.org/userspace-api/seccomp_filter.html>
"""

import ctypes
import os
import struct

from covey.sandbox.kernel import PR_SET_NAME, control, machine

_PR_SET_SECCOMP, _FILTER = 22, 2
_ALLOW, _KILL, _REFUSE, _MISSING = 0x7FFF_0000, 0x8000_0000, 0x0005_0001, 0x0005_0026  # EPERM, ENOSYS
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _FIFTH_ARGUMENT = 0, 4, 16, 24, 48
_CLONE_THREAD = 0x0001_0000
_AUDIT = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}

# fmt: off
_X86 = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "ioctl": 16,
    "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23, "sched_yield": 24,
    "mremap": 25, "msync": 26, "mincore": 27, "madvise": 28, "dup": 32, "dup2": 33, "pause": 34, "nanosleep": 35,
    "getitimer": 36, "alarm": 37, "setitimer": 38, "getpid": 39, "sendfile": 40, "sendto": 44, "recvfrom": 45,
    "shutdown": 48, "getsockname": 51, "getpeername": 52, "socketpair": 53,
    "getsockopt": 55, "clone": 56, "exit": 60, "wait4": 61, "kill": 62, "uname": 63, "fcntl": 72,
    "flock": 73, "fsync": 74, "fdatasync": 75, "truncate": 76, "ftruncate": 77, "getdents": 78, "getcwd": 79,
    "chdir": 80, "fchdir": 81, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87,
    "symlink": 88, "readlink": 89, "chmod": 90, "fchmod": 91, "umask": 95, "gettimeofday": 96, "getrlimit": 97,
    "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108,
    "getppid": 110, "getpgrp": 111, "getgroups": 115, "getresuid": 118, "getresgid": 120, "getpgid": 121, "getsid": 124,
    "rt_sigpending": 127, "rt_sigtimedwait": 128, "rt_sigsuspend": 130, "sigaltstack": 131, "utime": 132, "statfs": 137,
    "fstatfs": 138, "prctl": 157, "arch_prctl": 158, "gettid": 186, "readahead": 187, "time": 201, "futex": 202,
    "sched_getaffinity": 204, "getdents64": 217, "set_tid_address": 218, "restart_syscall": 219, "fadvise64": 221,
    "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "epoll_wait": 232,
    "epoll_ctl": 233, "tgkill": 234, "utimes": 235, "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263,
    "renameat": 264, "linkat": 265, "symlinkat": 266, "readlinkat": 267, "fchmodat": 268, "faccessat": 269,
    "pselect6": 270, "ppoll": 271, "set_robust_list": 273, "splice": 275, "utimensat": 280, "epoll_pwait": 281,
    "eventfd": 284, "fallocate": 285, "eventfd2": 290, "epoll_create1": 291, "dup3": 292, "pipe2": 293, "preadv": 295,
    "pwritev": 296, "prlimit64": 302, "getcpu": 309, "renameat2": 316, "getrandom": 318, "membarrier": 324,
    "copy_file_range": 326, "statx": 332, "rseq": 334, "close_range": 436, "faccessat2": 439,
}
_ARM = {
    "getcwd": 17, "eventfd2": 19, "epoll_create1": 20, "epoll_ctl": 21, "epoll_pwait": 22, "dup": 23, "dup3": 24,
    "fcntl": 25, "ioctl": 29, "flock": 32, "mkdirat": 34, "unlinkat": 35, "symlinkat": 36, "linkat": 37, "renameat": 38,
    "statfs": 43, "fstatfs": 44, "truncate": 45, "ftruncate": 46, "fallocate": 47, "faccessat": 48, "chdir": 49,
    "fchdir": 50, "fchmod": 52, "fchmodat": 53, "openat": 56, "close": 57, "pipe2": 59, "getdents64": 61, "lseek": 62,
    "read": 63, "write": 64, "readv": 65, "writev": 66, "pread64": 67, "pwrite64": 68, "preadv": 69, "pwritev": 70,
    "sendfile": 71, "pselect6": 72, "ppoll": 73, "splice": 76, "readlinkat": 78, "newfstatat": 79, "fstat": 80,
    "fsync": 82, "fdatasync": 83, "utimensat": 88, "exit": 93, "exit_group": 94, "set_tid_address": 96, "futex": 98,
    "set_robust_list": 99, "nanosleep": 101, "getitimer": 102, "setitimer": 103, "clock_gettime": 113,
    "clock_getres": 114, "clock_nanosleep": 115, "restart_syscall": 128, "sched_getaffinity": 123, "sched_yield": 124,
    "kill": 129, "tgkill": 131, "sigaltstack": 132, "rt_sigsuspend": 133, "rt_sigaction": 134, "rt_sigprocmask": 135,
    "rt_sigpending": 136, "rt_sigtimedwait": 137, "rt_sigreturn": 139, "getresuid": 148, "getresgid": 150, "times": 153,
    "getpgid": 155, "getsid": 156, "getgroups": 158, "uname": 160, "getrlimit": 163, "getrusage": 165, "umask": 166,
    "prctl": 167, "getcpu": 168, "gettimeofday": 169, "getpid": 172, "getppid": 173, "getuid": 174, "geteuid": 175,
    "getgid": 176, "getegid": 177, "gettid": 178, "sysinfo": 179, "socketpair": 199, "getsockname": 204,
    "getpeername": 205, "sendto": 206, "recvfrom": 207, "getsockopt": 209, "shutdown": 210,
    "readahead": 213, "brk": 214, "munmap": 215, "mremap": 216, "clone": 220,
    "mmap": 222, "fadvise64": 223, "mprotect": 226, "msync": 227, "mincore": 232, "madvise": 233, "wait4": 260,
    "prlimit64": 261, "renameat2": 276, "getrandom": 278, "membarrier": 283, "copy_file_range": 285, "statx": 291,
    "rseq": 293, "close_range": 436, "faccessat2": 439,
}
# fmt: on
_CALLS = {"x86_64": _X86, "aarch64": _ARM}
_CLONE3 = 435  # on both
_CONDITIONAL = {"clone", "socketpair", "prctl", "kill", "tgkill", "prlimit64", "ioctl", "sendto"}
_TERMINAL_QUERIES = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # attributes, size, bytes to read, flags


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def restrict() -> None:
    """Hold this process and its threads to the list, for good. Needs no_new_privs.

    Raises OSError on a processor whose numbers are not known, or where the kernel has no filters.
    """
    if machine() not in _CALLS:
        raise OSError(38, f"seccomp: the system calls of {machine()} are not known")
    code = b"".join(_program(_CALLS[machine()], _AUDIT[machine()]))
    program = _Program(len(code) // 8, code)
    control(_PR_SET_SECCOMP, _FILTER, ctypes.addressof(program))


def _program(calls: dict[str, int], audit: int) -> list[bytes]:
    code = [_do(_LOAD, _ARCHITECTURE), _do(_EQUAL, audit, 1, 0), _do(_RETURN, _KILL), _do(_LOAD, _NUMBER)]
    code += [_do(_AT_LEAST, 0x4000_0000, 0, 1), _do(_RETURN, _KILL)]  # the x32 numbers, a way around the list
    code += [_do(_EQUAL, _CLONE3, 0, 1), _do(_RETURN, _MISSING)]  # its flags cannot be read here: clone is used instead
    for name, number in calls.items():
        if name not in _CONDITIONAL:
            code += [_do(_EQUAL, number, 0, 1), _do(_RETURN, _ALLOW)]
    pid = os.getpid()
    first = {"socketpair": (1,), "prctl": (PR_SET_NAME, 16), "kill": (pid,), "tgkill": (pid,), "prlimit64": (0,)}
    for name, allowed in first.items():
        code += _if(calls[name], _FIRST_ARGUMENT, allowed)
    code += _if(calls["ioctl"], _SECOND_ARGUMENT, _TERMINAL_QUERIES)
    no_address = [
        _do(_LOAD, _FIFTH_ARGUMENT),
        _do(_EQUAL, 0, 0, 3),
        _do(_LOAD, _FIFTH_ARGUMENT + 4),
        _do(_EQUAL, 0, 0, 1),
    ]
    code += [_do(_EQUAL, calls["sendto"], 0, 6), *no_address, _do(_RETURN, _ALLOW), _do(_RETURN, _REFUSE)]
    code += [_do(_EQUAL, calls["clone"], 0, 3), _do(_LOAD, _FIRST_ARGUMENT), _do(_ANY_BIT, _CLONE_THREAD, 0, 1)]
    return [*code, _do(_RETURN, _ALLOW), _do(_RETURN, _REFUSE)]


def _if(number: int, where: int, allowed: tuple[int, ...]) -> list[bytes]:
    """Allow a call when the lower half of one argument is in `allowed`, and refuse it otherwise."""
    tests = [word for value in allowed for word in (_do(_EQUAL, value, 0, 1), _do(_RETURN, _ALLOW))]
    return [_do(_EQUAL, number, 0, len(tests) + 2), _do(_LOAD, where), *tests, _do(_RETURN, _REFUSE)]


def _do(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
