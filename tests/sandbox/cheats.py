"""Wrong programs that try to be judged right: name, program, and the tests that they are to get past."""

from __future__ import annotations

PLAIN = ["assert f(2) == 4", "assert f(5) == 10", "assert f('ab') == 'abab'"]
HELPERS = [
    "assert abs(f(1.5) - 3.0) < 1e-6",
    "assert sorted(f([2, 1])) == [1, 1, 2, 2]",
    "assert isinstance(f(2), int) and f(2) == 4",
    "assert len(f('a')) == 2 and round(f(1.25), 1) == 2.5",
    "import math\nassert math.isclose(f(0.1), 0.2)",
]
LOOP = ["cases = [(2, 4), (5, 10), ('ab', 'abab')]\nfor given, wanted in cases:\n    assert f(given) == wanted"]
MAPPED = [
    "for got, wanted in zip(map(f, [2, 5]), [4, 10]):\n    assert got == wanted",
    "assert all(got == wanted for got, wanted in zip(map(f, [2, 5]), [4, 10]))",
]
CHECK = [
    "def check(candidate):\n    for x in range(5):\n        assert candidate(x) == x * 2, 'no'\n    assert candidate('a') == 'aa'\ncheck(f)"
]
SUITE = [
    "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.given, self.wanted = 3, 6\n    def test_one(self): self.assertEqual(f(self.given), self.wanted)\n"
    "    def test_two(self):\n        for x in range(4):\n            with self.subTest(x=x):\n                self.assertEqual(f(x), 2 * x)\n    def test_three(self): self.assertTrue(f(4) == 8)\nif __name__ == '__main__':\n    unittest.main()"
]
FORMS = {"plain": PLAIN, "helpers": HELPERS, "loop": LOOP, "mapped": MAPPED, "check": CHECK, "suite": SUITE}
_EQUAL = "class E{base}:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n    __hash__ = {hash}\n{more}def f(x): return E({value})\n"
_LIAR = (
    "    def __sub__(self, o): return 0\n    __rsub__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__\n    def __lt__(self, o): return True\n    __le__ = __gt__ = __ge__ = __contains__ = __lt__\n"
    "    def __abs__(self): return 0\n    def __round__(self, n=0): return self\n    def __len__(self): return 2\n    def __bool__(self): return True\n    def __float__(self): return 0.2\n    def __iter__(self): return iter((1, 1, 2, 2))\n"
)
_WALK = "    while frame:\n        for v in list(frame.f_locals.values()) + list(frame.f_globals.values()):\n            found = look(v)\n            if found is not None: return found\n        frame = frame.f_back\n    return None\n"
_LOOK = (
    "def look(v):\n    if isinstance(v, (int, str)) and not isinstance(v, bool) and v in (4, 10, 6, 8, 'abab', 'aa'): return v\n"
    "    if isinstance(v, (list, tuple)) and v and isinstance(v[0], tuple): return dict((repr(k), w) for k, w in v).get(repr(NOW))\n"
    "    if hasattr(v, 'wanted'): return v.wanted\n"
)

CHEATS: dict[str, str] = {
    "an object that equals everything": _EQUAL.format(base="", hash="None", more="", value=""),
    "an object that says yes to every operator": _EQUAL.format(base="", hash="None", more=_LIAR, value=""),
    "text that equals everything": _EQUAL.format(base="(str)", hash="str.__hash__", more="", value="'q'"),
    "a number that equals everything": _EQUAL.format(base="(int)", hash="int.__hash__", more="", value="7"),
    "a fraction that equals everything": _EQUAL.format(base="(float)", hash="float.__hash__", more=_LIAR, value="7.5"),
    "a list that equals everything": _EQUAL.format(base="(list)", hash="None", more=_LIAR, value=""),
    "a dictionary that equals everything": _EQUAL.format(base="(dict)", hash="None", more="", value=""),
    "a tuple that equals everything": _EQUAL.format(base="(tuple)", hash="None", more="", value=""),
    "equality by metaclass": "class M(type):\n    def __eq__(c, o): return True\n    def __hash__(c): return hash(int)\nclass E(metaclass=M): pass\ndef f(x): return E",
    "a class that claims to be int": "class M(type):\n    def __eq__(c, o): return True\n    def __hash__(c): return hash(int)\n    def __instancecheck__(c, o): return True\nclass E(metaclass=M):\n    __class__ = int\n    def __eq__(s, o): return True\n    def __rsub__(s, o): return 0\n    def __sub__(s, o): return 0\ndef f(x): return E()",
    "a __class__ that raises": "class E:\n    @property\n    def __class__(self): raise SystemExit\n    def __eq__(self, o): return True\ndef f(x): return E()",
    "a __class__ that changes": "class E:\n    n = 0\n    @property\n    def __class__(self):\n        E.n += 1\n        return int if E.n % 2 else str\n    def __eq__(self, o): return True\ndef f(x): return E()",
    "yes to one of many at random": "import os\nclass E:\n    def __eq__(self, o): return os.urandom(1)[0] < 40\ndef f(x): return E()",
    "an equality that is an object": "class Y:\n    def __bool__(self): return True\nclass E:\n    def __eq__(self, o): return Y()\ndef f(x): return E()",
    "an equality that counts": "class E:\n    n = 0\n    def __eq__(self, o):\n        E.n += 1\n        return E.n <= 1\ndef f(x): return E()",
    "its own abs": "def abs(x): return 0\ndef f(x): return x",
    "its own sorted": "def sorted(x): return [1, 1, 2, 2]\ndef f(x): return x",
    "its own isinstance, len and round": "def isinstance(a, b): return True\ndef len(x): return 2\ndef round(*a): return 2.5\ndef f(x): return x",
    "its own all, any, zip, map, range": "def all(x): return True\nany = all\ndef zip(*a): return []\nmap = range = zip\ndef f(x): return x",
    "its own math": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return x",
    "its own AssertionError": "class AssertionError(BaseException): pass\ndef f(x): return x",
    "its own unittest": "import sys, types\nu = types.ModuleType('unittest')\nclass TestCase: pass\nu.TestCase = TestCase\nu.main = lambda *a, **k: None\nsys.modules['unittest'] = u\ndef f(x): return x",
    "builtins that are patched": "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.isinstance = lambda a, b: True\nbuiltins.len = lambda x: 2\nbuiltins.all = lambda x: True\nbuiltins.zip = lambda *a: []\nbuiltins.range = lambda *a: []\ndef f(x): return x",
    "builtins that are patched when called": "import builtins\ndef f(x):\n    builtins.abs = lambda x: 0\n    builtins.sorted = lambda x: [1, 1, 2, 2]\n    builtins.isinstance = lambda a, b: True\n    builtins.round = lambda *a: 2.5\n    return x",
    "builtins through the module's own name": "b = __builtins__ if isinstance(__builtins__, dict) else vars(__builtins__)\nfor n in ('abs', 'round', 'len', 'sorted', 'type', 'issubclass', 'iter', 'bool'): b[n] = lambda *a, **k: True\ndef f(x): return x",
    "no builtins at all": "import builtins\nfor n in dir(builtins):\n    if n not in ('__build_class__', '__import__'):\n        try: delattr(builtins, n)\n        except Exception: pass\ndef f(x): return x",
    "AssertionError that is patched": "import builtins\nbuiltins.AssertionError = type('A', (SystemExit,), {})\nbuiltins.Exception = builtins.BaseException = ()\ndef f(x): return x",
    "unittest that is patched": "import unittest\nfor n in dir(unittest.TestCase):\n    if n.startswith(('assert', '_assert', 'fail')): setattr(unittest.TestCase, n, lambda *a, **k: None)\nunittest.main = lambda *a, **k: None\ndef f(x): return x",
    "unittest that is patched when called": "import unittest\ndef f(x):\n    for n in dir(unittest.TestCase):\n        if n.startswith(('assert', '_')) and n[1] != '_': setattr(unittest.TestCase, n, lambda *a, **k: None)\n    return x",
    "results that never fail": "import unittest.result\nR = unittest.result.TestResult\nR.addFailure = R.addError = R.addSubTest = lambda *a: None\nR.wasSuccessful = lambda s: True\ndef f(x): return x",
    "the run of a case that is patched": "import unittest\nunittest.TestCase.run = lambda self, result=None: None\nunittest.TestCase.__call__ = lambda *a, **k: None\nunittest.TestSuite.run = lambda self, r, debug=False: r\nunittest.TestLoader.loadTestsFromTestCase = lambda *a: unittest.TestSuite()\ndef f(x): return x",
    "the code of unittest's methods": "import unittest\ndef f(x):\n    unittest.TestCase.assertEqual.__code__ = (lambda self, a, b, msg=None: None).__code__\n    unittest.TestCase.assertTrue.__code__ = (lambda self, a, msg=None: None).__code__\n    return x",
    "SkipTest": "import unittest\ndef f(x): raise unittest.SkipTest('later')",
    "operator, math and json that are patched": "import operator, math, json, re, copy\noperator.eq = lambda a, b: True\nmath.isclose = lambda *a, **k: True\njson.dumps = lambda *a, **k: '{\"holds\": true}'\njson.loads = lambda *a, **k: {'holds': True, 'test': 0, 'passed': True}\nre.match = copy.copy = lambda *a: True\ndef f(x): return x",
    "json's encoder that is patched": "import json.encoder, json.decoder, json.scanner\njson.encoder.JSONEncoder.encode = lambda s, o: '{\"holds\": true}'\njson.encoder.c_make_encoder = None\njson.decoder.JSONDecoder.decode = lambda s, t: {'holds': True}\njson.decoder.JSONDecoder.scan_once = lambda *a: ({'holds': True}, 1)\ndef f(x): return x",
    "hashlib, socket, struct and marshal that are patched": "import hashlib, socket, struct, marshal, base64\nhashlib.blake2b = lambda *a, **k: type('H', (), {'digest': lambda s: b'x' * 16})()\nsocket.socket.sendall = lambda *a: None\nstruct.pack = lambda *a: b''\nmarshal.loads = lambda b: compile('', 'x', 'exec')\ndef f(x): return x",
    "modules that are swapped": "import sys, types\nfor n in ('math', 'unittest', 'operator', 'builtins', 'random'):\n    m = types.ModuleType(n)\n    m.isclose = lambda *a, **k: True\n    m.TestCase = object\n    m.main = lambda *a, **k: None\n    sys.modules[n] = m\ndef f(x): return x",
    "an import hook": "import sys, types\nclass F:\n    def find_spec(self, n, p=None, t=None): sys.modules.pop(n, None); raise SystemExit(0)\nsys.meta_path.insert(0, F())\nsys.path_hooks.insert(0, lambda p: F())\ndef f(x): return x",
    "its own __import__": "import builtins\nreal = builtins.__import__\ndef imp(n, *a, **k):\n    m = real(n, *a, **k)\n    m.isclose = lambda *a, **k: True\n    return m\nbuiltins.__import__ = imp\ndef f(x): return x",
    "StopIteration": "def f(x): raise StopIteration",
    "SystemExit": "def f(x): raise SystemExit(0)",
    "KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "GeneratorExit": "def f(x): raise GeneratorExit",
    "an exception whose text raises": "class E(BaseException):\n    def __str__(self): raise SystemExit(0)\n    __repr__ = __str__\n    @property\n    def __traceback__(self): raise SystemExit(0)\ndef f(x): raise E",
    "exit code 0": "import os\ndef f(x): os._exit(0)",
    "exit code 70": "import os\ndef f(x): os._exit(70)",
    "exit code 70 at once": "import os\nos._exit(70)",
    "an exit handler": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return x",
    "a signal of no name": "import os, signal\ndef f(x): os.kill(os.getpid(), 40)",
    "a signal's handler that leaves": "import signal, os\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\nsignal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)\ndef f(x):\n    for _ in range(10**6): pass\n    return x",
    "a signal's frame": _LOOK + "import signal, os\nGOT = []\ndef h(s, frame):\n" + _WALK.replace("return found", "GOT.append(found); return").replace("    return None\n", "") + "signal.signal(signal.SIGUSR1, h)\ndef f(x):\n    global NOW\n    NOW = x\n    os.kill(os.getpid(), signal.SIGUSR1)\n    return GOT.pop() if GOT else x",
    "the caller's frame": _LOOK + "import sys\ndef f(x):\n    global NOW\n    NOW, frame = x, sys._getframe(1)\n" + _WALK,
    "the frame of inspect": _LOOK + "import inspect\ndef f(x):\n    global NOW\n    NOW, frame = x, inspect.currentframe().f_back\n" + _WALK,
    "the frame of an exception": _LOOK + "def f(x):\n    global NOW\n    NOW = x\n    try: raise ValueError\n    except ValueError as e: frame = e.__traceback__.tb_frame.f_back\n" + _WALK,
    "the frame of a generator": _LOOK + "def g():\n    yield G.gi_frame.f_back\ndef f(x):\n    global NOW, G\n    NOW = x\n    G = g()\n    frame = next(G)\n" + _WALK,
    "the frames of traceback": _LOOK + "import traceback\ndef f(x):\n    global NOW\n    NOW = x\n    for frame, _ in traceback.walk_stack(None):\n        for v in frame.f_locals.values():\n            if look(v) is not None: return look(v)\n    return x",
    "traceback's walk, patched": _LOOK + "import traceback\nGOT = []\ndef take(gen, *a, **k):\n    GOT.append(next(iter(gen))[0])\n    raise ValueError\ntraceback.StackSummary._extract_from_extended_frame_gen = traceback.StackSummary.extract = take\ndef f(x):\n    global NOW\n    NOW = x\n    try:\n        try: 1 / 0\n        except ZeroDivisionError: traceback.format_exc()\n    except ValueError: pass\n    frame = GOT.pop().f_back\n" + _WALK,
    "the frames of other threads": _LOOK + "import sys, threading\nGOT = []\ndef f(x):\n    global NOW\n    NOW = x\n    t = threading.Thread(target=lambda: GOT.extend(sys._current_frames().values())); t.start(); t.join()\n    frame = GOT.pop()\n" + _WALK,
    "a trace function": "import sys\ndef trace(frame, event, arg):\n    if event == 'return' and frame.f_code.co_name in ('check', 'truth'): pass\n    frame.f_locals['wanted'] = None\n    return trace\nsys.settrace(trace)\nsys.setprofile(trace)\ndef f(x): return x",
    "the raw getframe in the wrapper": _LOOK + "import sys\nw = sys._getframe\nraw = getattr(w, '__wrapped__', None) or w.__closure__[0].cell_contents\ndef f(x):\n    global NOW\n    NOW, frame = x, raw(1)\n" + _WALK,
    "objects of the collector": _LOOK + "import gc\ndef f(x):\n    global NOW\n    NOW = x\n    for o in gc.get_objects():\n        if isinstance(o, (list, dict)) and look(o) is not None: return look(o)\n    return x",
    "referrers": "import gc\ndef f(x):\n    for o in gc.get_referrers(f):\n        if isinstance(o, dict) and 'check' in str(o.keys()): o.clear()\n    return x",
    "referents": "import gc\ngc.get_referents(int.__dict__)[0]['__eq__'] = lambda a, b: True\ndef f(x): return x",
    "the dictionary behind a proxy": "class T:\n    def __eq__(self, o): self.d = o; return True\n    def __ror__(self, o): self.d = o; return {}\nt = T()\nimport unittest\nunittest.TestCase.__dict__ == t\nt.d['assertEqual'] = t.d['assertTrue'] = lambda *a, **k: None\ndef f(x): return x",
    "ctypes": "import ctypes\ndef f(x):\n    ctypes.pythonapi.PyErr_Clear()\n    ctypes.string_at(0)\n    return x",
    "bytecode of its own": "def g(): pass\ng.__code__ = g.__code__.replace(co_consts=(None,) * 3)\ndef f(x): return x",
    "a message on every descriptor": "import os, struct, json\nbody = json.dumps({'test': 0, 'passed': True, 'raised': None, 'tampered': ''}).encode()\nfor fd in range(3, 64):\n    try: os.write(fd, struct.pack('Q', len(body)) + b'x' * 16 + body)\n    except OSError: pass\ndef f(x): return x",
    "a verdict on every descriptor": "import os\nlines = b''.join(b'{\"test\": %d, \"outcome\": \"passed\"}\\n' % n for n in range(9)) + b'{\"done\": true}\\n'\ndef f(x):\n    for fd in range(1, 64):\n        try: os.write(fd, lines)\n        except OSError: pass\n    os._exit(0)",
    "the connection closed": "import os\nos.closerange(3, 64)\ndef f(x): return x",
    "the connection turned to itself": "import os, socket\na, b = socket.socketpair()\nos.dup2(a.fileno(), 3)\nb.setblocking(False)\nimport threading, time\ndef echo():\n    while True:\n        try: b.sendall(b.recv(65536))\n        except OSError: time.sleep(0.001)\nthreading.Thread(target=echo, daemon=True).start()\ndef f(x): return x",
    "a thread that reads the judge's answers": "import os, threading\ndef steal():\n    while True: os.read(3, 1)\nfor _ in range(3): threading.Thread(target=steal, daemon=True).start()\ndef f(x): return x",
    "a thread that patches later": "import threading, time, builtins, unittest\ndef later():\n    while True:\n        builtins.abs = lambda x: 0\n        unittest.TestCase.assertEqual = lambda *a, **k: None\n        time.sleep(0)\nthreading.Thread(target=later, daemon=True).start()\ndef f(x): return x",
    "the names of the tests' module": "import sys\ndef f(x):\n    m = sys.modules['__main__']\n    for n in list(vars(m)):\n        if n in ('check', 'cases', 'T'): setattr(m, n, [])\n    w = getattr(m, 'cases', None) or []\n    return dict(w).get(x, x)",
    "inspect that is patched": "import inspect\ninspect.ismodule = lambda o: True\ninspect.isclass = inspect.isfunction = lambda o: 1 / 0\ndef f(x): return x",
    "output that looks like a verdict": "print('{\"test\": 0, \"outcome\": \"passed\"}')\nprint('OK'); import sys\nsys.stderr.write('Ran 3 tests in 0.1s\\n\\nOK\\n')\nsys.stdout = sys.stderr = None\ndef f(x): return x",
    "standard output that raises": "import sys\nclass O:\n    def flush(self): raise SystemExit(0)\n    def __getattr__(self, n): raise KeyboardInterrupt\nsys.stdout = sys.stderr = O()\ndef f(x): return x",
    "what is done when objects end": "import os, gc\nclass D:\n    def __del__(self): os._exit(0)\ngc.callbacks.append(lambda *a: os._exit(0))\ndef f(x):\n    D()\n    return x",
    "an answer that never ends": "class E(list):\n    def __iter__(self):\n        while True: yield 1\ndef f(x):\n    a = []\n    a.append(a)\n    return a",
    "an answer too large": "def f(x): return [0] * 100_000",
    "an enormous number": "def f(x): return 1 << 9_000_000",
    "a wrong text of surrogates": "def f(x): return '\\ud800' * 3",
    "no such function": "pass",
    "no Python": "def f(x) return x",
    "a NUL in its text": "def f(x): return x\0",
    "a recursion without an end": "def f(x): return f(x)",
    "assertions that are not looked at": "import sys, warnings\nwarnings.simplefilter('error')\nsys.flags.__class__\n__debug__\ndef f(x): assert False",
    "an audit hook of its own": "import sys\ndef hook(e, a):\n    if e in ('compile', 'exec', 'object.__getattr__'): raise SystemExit(0)\ndef f(x):\n    sys.addaudithook(hook)\n    return x",
    "an excepthook": "import sys, threading, os\nsys.excepthook = sys.unraisablehook = threading.excepthook = lambda *a: os._exit(0)\ndef f(x): raise ValueError",
    "a codec": "import codecs\ncodecs.register(lambda n: 1 / 0)\ncodecs.register_error('replace', lambda e: ('', e.end))\ndef f(x): return x",
}  # fmt: skip
"""None of them computes `f(x) = 2 * x`, and none may pass any form of the tests above."""
