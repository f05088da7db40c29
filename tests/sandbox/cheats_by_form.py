"""Liars, each a way to be equal to anything or to learn what is expected, against tests of forms that no list of forms has."""

from __future__ import annotations

RIGHT = "async def g(x): return f(x)\nclass Box:\n    def __init__(self, x): self.x = x\n    def get(self): return f(self.x)\ndef f(x): return 24303 * x + 5\n"
"""What the liars' `f` should be; `g` and `Box` hand its values on."""
_REST = RIGHT.rpartition("def f")[0]
_ALL = (
    "    def __ne__(s, o): return False\n    def __sub__(s, o): return s\n    __rsub__ = __add__ = __radd__ = __mul__ = __sub__\n    def __abs__(s): return s\n    def __lt__(s, o): return True\n    __le__ = __gt__ = __ge__ = __lt__\n"
    "    def __float__(s): return 0.0\n    def __round__(s, n=0): return s\n    def __len__(s): return 2\n    def __contains__(s, o): return True\n    def __iter__(s): return iter((s, s))\n    def __getitem__(s, i): return s\n    def __str__(s): return ''\n    def __repr__(s): return ''\n"
)
_YES = "class E{}:\n    def __eq__(s, o): return True\n    def __hash__(s): return {}\n" + _ALL
_LOOK = "import re\ndef look(t):\n    found = [int(w) for w in re.findall(r'\\b(?:4861[1]|7291[4])\\b', t)]\n    return found[0] if found else 0\n"
LIARS: dict[str, str] = {
    "equals everything": _YES.format("", "hash(48611)") + "def f(x): return E()",
    "an integer that equals everything": _YES.format("(int)", "1") + "def f(x): return E(7)",
    "a text that equals everything": _YES.format("(str)", "2") + "def f(x): return E('q')",
    "a list that equals everything": _YES.format("(list)", "3") + "def f(x): return E()",
    "a class called f": _YES.format("", "4").replace("class E", "class f") + "    def __init__(s, *a): pass",
    "yes to integers of five digits": "class E:\n    def __eq__(s, o): return isinstance(o, int) and 9999 < o < 10 ** 5\n    def __hash__(s): return 5\ndef f(x): return E()",
    "yes to the first": "class E:\n    n = 0\n    def __eq__(s, o):\n        s.n += 1\n        return s.n == 1\n    __hash__ = object.__hash__\ndef f(x): return E()",
    "yes by another object": "class Y:\n    def __bool__(s): return True\nclass E:\n    def __eq__(s, o): return Y()\n    __hash__ = None\ndef f(x): return E()",
    "a class made in each call": "def f(x): return type('E', (), {'__eq__': lambda s, o: True, '__hash__': lambda s: 6})()",
    "learns what it is compared with": "SEEN = []\nclass E:\n    def __eq__(s, o):\n        SEEN.append(o)\n        return True\n    __hash__ = None\ndef f(x): return SEEN[-1] if SEEN else E()",
    "a metaclass that equals everything": "class M(type):\n    def __eq__(c, o): return True\n    def __hash__(c): return 8\nclass E(metaclass=M): pass\ndef f(x): return E",
    "locals of a stack": _LOOK + "import traceback\ndef f(x): return look(repr([s.locals for s in traceback.StackSummary.extract(traceback.walk_stack(None), capture_locals=True)]))",
    "locals of a traceback": _LOOK + "import traceback\nK = ValueError()\ndef f(x):\n    if x < 0: raise K\n    t = traceback.TracebackException(ValueError, K, K.__traceback__, capture_locals=True)\n    return look(repr([s.locals for s in t.stack]))",
    "uncollected garbage": _LOOK + "import gc\ntry: gc.set_debug(gc.DEBUG_SAVEALL)\nexcept Exception: pass\ndef f(x):\n    gc.collect()\n    return look(repr(gc.garbage)[:10 ** 6])",
    "StopIteration": "def f(x): raise StopIteration",
    "GeneratorExit": "def f(x): raise GeneratorExit",
    "skips": "import unittest\ndef f(x): raise unittest.SkipTest('no')",
    "leaves": "import os\ndef f(x): os._exit(0)",
    "hangs up": "import os\ndef f(x): os.closerange(3, 60)",
    "asyncio.run that runs nothing": "import asyncio\nasyncio.run = asyncio.runners.run = lambda c, **k: c.close()\nasyncio.Runner = None\nasyncio.BaseEventLoop.run_until_complete = lambda s, c: c.close()\ndef f(x): return 0",
    "checks that check nothing": "import unittest, operator, builtins\nfor n in dir(unittest.TestCase):\n    if n.startswith('assert'): setattr(unittest.TestCase, n, lambda *a, **k: None)\noperator.eq = lambda a, b: True\nbuiltins.all = lambda x: True\nbuiltins.any = lambda x: False\ndef f(x): return 0",
}  # fmt: skip
LIARS = {name: _REST + code for name, code in LIARS.items()}
_CASE = "import unittest\nclass T(unittest.TestCase):\n"
FORMS: dict[str, str] = {
    "a nested function": "def outer():\n    def same(a, b): return a == b\n    return same\nassert outer()(f(2), 48611)",
    "a default argument": "def expect(x, want=48611): assert f(x) == want\nexpect(2)",
    "a decorator": "def checks(fn):\n    for x, y in fn(): assert f(x) == y\n    return fn\n@checks\ndef cases(): return [(2, 48611), (3, 72914)]",
    "a dictionary of cases": "for x, y in {2: 48611, 3: 72914}.items():\n    assert f(x) == y, (x, y)",
    "a generator of booleans": "def oks():\n    yield f(2) == 48611\n    yield f(3) == 72914\nassert list(oks()) == [True, True]",
    "a sum of booleans": "assert sum(f(x) == y for x, y in ((2, 48611), (3, 72914))) == 2",
    "operator.eq": "import operator\nassert operator.eq(f(2), 48611)\nassert not operator.ne(f(2), 48611)",
    "a partial": "import functools, operator\nis_it = functools.partial(operator.eq, 48611)\nassert is_it(f(2))",
    "lists": "assert [f(2), f(3)] == [48611, 72914]",
    "index and count": "assert [48611, 72914].index(f(3)) == 1 and [48611].count(f(2)) == 1",
    "a set": "assert {f(2), f(3)} == {48611, 72914}",
    "a key": "assert {48611: 'a', 72914: 'b'}[f(3)] == 'b'",
    "a difference": "assert abs(f(2) - 48611) < 1e-9 and not abs(f(3) - 72914) > 0",
    "a range": "assert 48610 < f(2) < 48612",
    "math.isclose": "import math\nassert math.isclose(f(2), 48611, rel_tol=1e-9)",
    "not unequal": "assert not f(2) != 48611\nassert not (f(3) < 72914 or f(3) > 72914)",
    "try and else": "try:\n    assert f(2) == 48611\nexcept Exception as e:\n    raise AssertionError from e\nelse:\n    assert f(3) == 72914",
    "a loop that counts": "bad = 0\nfor x, y in zip((2, 3), (48611, 72914)):\n    bad += f(x) != y\nassert bad == 0",
    "map and starmap": "from itertools import starmap\nassert all(starmap(lambda a, b: a == b, zip(map(f, [2, 3]), [48611, 72914])))\nassert list(map(f, [2, 3])) == [48611, 72914]",
    "a reference of its own": "def ref(x):\n    return x * 24303 + 5\nfor x in range(20):\n    assert f(x) == ref(x)",
    "random inputs": "import random\nrng = random.Random(4)\nfor _ in range(9):\n    n = rng.randint(1, 999)\n    assert f(n) == n * 24303 + 5",
    "unittest with sub-tests": _CASE + "    def test(self):\n        for x, y in [(2, 48611), (3, 72914)]:\n            with self.subTest(x=x): self.assertEqual(f(x), y)",
    "unittest in its own words": _CASE + "    def check(self, x, want): self.assertTrue(f(x) == want)\n    def test(self):\n        self.check(2, 48611)\n        self.assertAlmostEqual(f(3), 72914, delta=0.1)\n        self.assertIn(f(2), [48611])",
    "tables of functions": "tests = [(f, 2, 48611), (f, 3, 72914)]\nfor fn, x, y in tests:\n    assert fn(x) == y",
    "await": "import asyncio\nasync def main():\n    assert await g(2) == 48611\n    assert await g(3) == 72914\nasyncio.run(main())",
    "gather": "import asyncio\nasync def one(x, y): assert await g(x) == y\nasync def main(): await asyncio.gather(one(2, 48611), one(3, 72914))\nasyncio.run(main())",
    "methods": "b = Box(2)\nassert b.get() == 48611\nassert Box(3).get() == 72914",
    "methods, by functions": "def same(a, b): return a == b\nassert same(Box(2).get(), 48611) and [72914].index(Box(3).get()) == 0",
    "methods, by operators": "import operator\nassert operator.eq(Box(2).get(), 48611)\nassert abs(Box(3).get() - 72914) < 1e-6",
    "methods, in unittest": _CASE + "    def setUp(self): self.box = Box(2)\n    def test(self):\n        self.assertEqual(self.box.get(), 48611)\n        self.assertEqual(*(Box(3).get(), 72914))",
    "methods, after an exception": "try:\n    f(-1)\nexcept Exception: pass\nwant = 48611\nassert Box(2).get() == want",
    "methods, __eq__ by name": "assert Box(2).get().__eq__(48611) is True",
    "a class of the tests'": "class Case:\n    def __init__(self, x, want): self.x, self.want = x, want\n    def run(self): assert f(self.x) == self.want\nfor case in [Case(2, 48611), Case(3, 72914)]: case.run()",
    "code in a text": "exec('assert f(2) == 48611')\nassert eval('f(3) == 72914')\nassert eval('Box(2).get() == 48611')",
    "matching": "match Box(2).get():\n    case 48611: pass\n    case _: raise AssertionError",
}  # fmt: skip
