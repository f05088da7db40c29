"""Programs that try to get out of the sandbox. Each prints what it got hold of; `CANARY` must never be among it.

`{file}` is a file of the user's with the canary in it, `{folder}` the folder it is in, `{port}` a listener on loopback, `{socket}`
a Unix one, `{pid}` the process that started the sandbox.
"""

from __future__ import annotations

CANARY = "c4n4ry-8c1f"

_CALL = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def _system_call(*words: object) -> str:
    return f"{_CALL}print('GOT' if libc.syscall({', '.join(map(str, words))}) >= 0 else 'refused')"


READING = {
    "the password file": "print(open('/etc/passwd').read(), 'GOT')",
    "a file of the user's": "print(open({file!r}).read())",
    "the user's folder": "import os; print(os.listdir({folder!r}))",
    "the home folder": "import os; print(os.listdir(os.path.expanduser('~')), os.listdir('/root'), 'GOT')",
    "the environment": "import os; print(dict(os.environ))",
    "the environment of the run": "print(open('/proc/{pid}/environ').read())",
    "the environment of the first process": "print(open('/proc/1/environ').read())",
    "its own environment": "print(open('/proc/self/environ').read())",
    "the memory of the run": "print(open('/proc/{pid}/maps').read(), 'GOT')",
    "the root of the first process": "print(open('/proc/1/root' + {file!r}).read())",
    "the working folder of the run": "import os; print(os.listdir('/proc/{pid}/cwd'), 'GOT')",
    "a path with dots": "print(open('../../../../../..' + {file!r}).read())",
    "a symbolic link": "import os; os.symlink({file!r}, '/tmp/link'); print(open('/tmp/link').read())",
    "a hard link": "import os; os.link({file!r}, '/tmp/hard'); print(open('/tmp/hard').read())",
    "a folder opened before chroot": (
        "import os; here = os.open('/', os.O_RDONLY); os.mkdir('/tmp/jail'); os.chroot('/tmp/jail'); os.fchdir(here)\n"
        "[os.chdir('..') for _ in range(9)]; print(open('.' + {file!r}).read())"
    ),
    "open_by_handle_at": _system_call(304, 3, 0, 0),
    "descriptors left open": (
        "import os\nfor fd in range(3, 1024):\n    try:\n        print(fd, os.pread(fd, 9999, 0))\n    except OSError:\n        pass"
    ),
    "the network: TCP": "import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('GOT')",
    "the network: UDP": (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "s.sendto(b'x', ('127.0.0.1', {port})); print('GOT')"
    ),
    "the network: names": "import socket; print(socket.getaddrinfo('example.com', 80), 'GOT')",
    "a Unix socket": "import socket; s = socket.socket(socket.AF_UNIX); s.connect({socket!r}); print('GOT')",
    "a datagram to a Unix socket": (
        "import socket; a, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b'x', {socket!r}); print('GOT')"
    ),
    "ptrace of the run": _system_call(101, 16, "{pid}", 0, 0),
    "the memory of another process": (
        f"{_CALL}buffer = ctypes.create_string_buffer(64)\n"
        "class V(ctypes.Structure): _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
        "v = V(ctypes.addressof(buffer), 64)\n"
        "print('GOT' if libc.process_vm_readv({pid}, ctypes.byref(v), 1, ctypes.byref(v), 1, 0) > 0 else 'refused')"
    ),
    "a descriptor of the run": (
        f"{_CALL}p = libc.syscall(434, {{pid}}, 0)\nprint('GOT' if libc.syscall(438, p, 1, 0) >= 0 else 'refused')"
    ),
    "a program of the system's": "import subprocess; print(subprocess.run(['/bin/cat', {file!r}], capture_output=True).stdout)",
    "a shell": "import os; print('GOT' if os.system('true') == 0 else 'refused')",
    "exec": "import os; os.execv('/bin/echo', ['echo', 'GOT'])",
    "root again": "import os; os.setuid(0); print(open({file!r}).read())",
    "packages that somebody installed": "import torch; print('GOT')",
}
"""What a program should not see."""

KERNEL = {
    "mount": _system_call(165, 'b"none"', 'b"/tmp"', 'b"tmpfs"', 0, 0),
    "keys": _system_call(248, 'b"user"', 'b"name"', 'b"data"', 4, -3),
    "unshare": _system_call(272, 0x10000000),
    "setns": _system_call(308, 0, 0),
    "pivot_root": _system_call(155, 'b"/"', 'b"/tmp"'),
    "bpf": _system_call(321, 0, 0, 0),
    "io_uring_setup": _system_call(425, 8, "ctypes.create_string_buffer(256)"),
    "userfaultfd": _system_call(323, 0),
    "perf_event_open": _system_call(298, "ctypes.create_string_buffer(256)", 0, -1, -1, 0),
    "init_module": _system_call(175, 0, 0, 0),
    "reboot": _system_call(169, 0, 0, 0, 0),
    "sethostname": _system_call(170, 'b"x"', 1),
    "mknod": "import os, stat; os.mknod('/tmp/disk', stat.S_IFBLK | 0o600, os.makedev(8, 0)); open('/tmp/disk'); print('GOT')",
    "capset": (
        f"{_CALL}header = (ctypes.c_uint32 * 2)(0x20080522, 0); all_of_them = (ctypes.c_uint32 * 6)(*[2**32 - 1] * 6)\n"
        "print('GOT' if libc.syscall(126, header, all_of_them) == 0 else 'refused')"
    ),
    "netlink": "import socket; s = socket.socket(16, 3, 0); s.bind((0, 0)); print('GOT')",
    "a higher limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); print('GOT')",
}
"""System calls that only a way out needs; each prints GOT when it was granted."""

WRITING = {
    "a file of the user's": "open({file!r}, 'a').write('WRITTEN')",
    "a new file beside it": "open({folder!r} + '/new', 'w').write('WRITTEN')",
    "through a link": "import os; os.symlink({folder!r}, '/tmp/link'); open('/tmp/link/new', 'w').write('WRITTEN')",
    "a rename": "import os; os.rename({file!r}, {folder!r} + '/new')",
    "a removal": "import os; os.remove({file!r})",
    "its mode": "import os; os.chmod({file!r}, 0)",
    "its length": "import os; os.truncate({file!r}, 0)",
    "the library": "import os; open(os.__file__, 'a').write('# WRITTEN')",
    "the library's folder": "import os; open(os.path.dirname(os.__file__) + '/covey_was_here.py', 'w').write('x')",
    "the system's folder for files": "open('/var/tmp/covey_was_here', 'w').write('x')",
}
"""What a program should not change."""

GREEDY = {
    "memory": ("data = bytearray(10 * 2**30)", {"memory"}),
    "memory bit by bit": ("held = []\nwhile True: held.append(bytearray(2**20))", {"memory"}),
    "mapped memory": ("import mmap\nheld = mmap.mmap(-1, 10 * 2**30)", {"memory", "error"}),
    "an endless loop": ("while True: pass", {"timeout"}),
    "an endless loop in C": ("sum(iter(int, 1))", {"timeout"}),
    "a number too large": ("10 ** 10 ** 9", {"timeout", "memory"}),
    "a signal handler": ("import signal\nfor s in range(1, 30):\n    try: signal.signal(s, signal.SIG_IGN)\n    except OSError: pass\nwhile True: pass", {"timeout"}),
    "sleep": ("import time\ntime.sleep(1000)", {"timeout"}),
    "input that never comes": ("import os\nr, w = os.pipe()\nos.read(r, 1)", {"timeout"}),
    "endless output": ("while True: print('x' * 1000)", {"output", "timeout"}),
    "endless errors": ("import os\nwhile True: os.write(2, b'x' * 65536)", {"output", "timeout"}),
    "forks": ("import os\nwhile True: os.fork()", {"error", "timeout"}),
    "forks that are told to go on": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", {"timeout"}),
    "threads": ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()", {"error", "timeout", "memory"}),
    "descriptors": ("import os\nheld = [os.dup(0) for _ in range(10**6)]", {"error"}),
    "pipes": ("import os\nheld = [os.pipe() for _ in range(10**6)]", {"error"}),
    "a disk full": ("for n in range(10**6): open(f'/tmp/{n}', 'wb').write(bytes(2**20))", {"error"}),
    "one large file": ("f = open('/tmp/large', 'wb')\nwhile True: f.write(bytes(2**20))", {"error"}),
    "many small files": ("for n in range(10**7): open(f'/tmp/{n}', 'w').close()", {"error"}),
    "a stack": ("import ctypes\nctypes.string_at(0)", {"crashed"}),
    "recursion": ("def f(): f()\nf()", {"error"}),
    "a regular expression": ("import re\nre.match('(a+)+$', 'a' * 64 + 'b')", {"timeout"}),
}  # fmt: skip
"""What a program should not use up, and how it may end."""
