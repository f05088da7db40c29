"""Right programs that are used in more ways than by a call: name, program, tests, and what makes the program wrong."""

from __future__ import annotations

FAIR: dict[str, tuple[str, str | list[str], tuple[str, str]]] = {
    "a context manager": (
        "class T:\n    def __init__(self): self.log = []\n    def __enter__(self): self.log.append('in'); return self\n    def __exit__(self, *e): self.log.append('out'); return e[0] is ValueError\n",
        ["t = T()\nwith t as x:\n    assert x is t\nassert t.log == ['in', 'out']", "with T():\n    raise ValueError", "try:\n    with T():\n        raise KeyError('k')\nexcept KeyError as e:\n    assert e.args == ('k',)\nelse:\n    raise RuntimeError"], ("e[0] is ValueError", "True")),
    "contextlib.contextmanager": (
        "from contextlib import contextmanager, suppress, ExitStack\nlog = []\n@contextmanager\ndef tag(n):\n    log.append('<' + n)\n    try: yield n.upper()\n    finally: log.append(n + '>')\n",
        ["with tag('a') as x, tag('b') as y:\n    assert (x, y) == ('A', 'B')\nassert log == ['<a', '<b', 'b>', 'a>']", "try:\n    with tag('c'):\n        raise OSError\nexcept OSError:\n    pass\nassert log[-1] == 'c>'"], ("n.upper()", "n")),
    "coroutines": (
        "import asyncio\nasync def add(a, b):\n    await asyncio.sleep(0)\n    return a + b\nasync def both(): return await asyncio.gather(add(1, 2), add(3, 4))\n",
        ["import asyncio\nassert asyncio.run(add(1, 2)) == 3", "assert asyncio.run(both()) == [3, 7]", "async def main():\n    assert await add(5, 5) == 10\n    return True\nassert asyncio.run(main())"], ("a + b", "a - b")),
    "asynchronous iterators and context managers": (
        "class Count:\n    def __init__(self, n): self.n, self.i = n, 0\n    def __aiter__(self): return self\n    async def __anext__(self):\n        if self.i >= self.n: raise StopAsyncIteration\n        self.i += 1\n        return self.i\n    async def __aenter__(self): return self\n    async def __aexit__(self, *e): self.n = -1\nasync def gen(n):\n    for i in range(n): yield i * i\n",
        ["import asyncio\nasync def main():\n    assert [x async for x in Count(3)] == [1, 2, 3]\n    assert [x async for x in gen(4)] == [0, 1, 4, 9]\n    async with Count(2) as c:\n        assert c.n == 2\n    assert c.n == -1\nasyncio.run(main())"], ("i * i", "i + i")),
    "an asyncio queue and tasks": (
        "import asyncio\nasync def worker(q, out):\n    while True:\n        x = await q.get()\n        if x is None: return\n        out.append(x * 2)\n",
        ["import asyncio\nasync def main():\n    q, out = asyncio.Queue(), []\n    t = asyncio.create_task(worker(q, out))\n    for x in (1, 2, None): await q.put(x)\n    await asyncio.wait_for(t, 5)\n    return out\nassert asyncio.run(main()) == [2, 4]"], ("x * 2", "x * 3")),
    "generators: send, throw, close, from": (
        "def avg():\n    total, n, a = 0, 0, None\n    try:\n        while True:\n            x = yield a\n            total += x; n += 1; a = total / n\n    except ValueError: yield 'bad'\ndef chain(*its):\n    for it in its: yield from it\n",
        ["g = avg()\nnext(g)\nassert g.send(10) == 10 and g.send(20) == 15\nassert g.throw(ValueError) == 'bad'\ng.close()", "assert list(chain([1], (2, 3))) == [1, 2, 3]", "import types\nassert isinstance(chain(), types.GeneratorType)",
         "g = chain([1, 2])\nassert next(g) == 1\nassert next(g) == 2\nassert next(g, None) is None"], ("total / n", "total")),
    "an iterator": (
        "class Down:\n    def __init__(self, n): self.n = n\n    def __iter__(self): return self\n    def __next__(self):\n        if self.n <= 0: raise StopIteration\n        self.n -= 1\n        return self.n + 1\n",
        ["assert list(Down(3)) == [3, 2, 1]", "it = iter(Down(1))\nassert next(it) == 1\ntry:\n    next(it)\n    raise RuntimeError\nexcept StopIteration:\n    pass", "assert sum(Down(4)) == 10 and dict(zip('ab', Down(2))) == {'a': 2, 'b': 1}"], ("self.n + 1", "self.n")),
    "a class that the test derives from": (
        "class Base:\n    def area(self): raise NotImplementedError\n    def describe(self): return f'{type(self).__name__}: {self.area():.1f}'\n",
        ["class Sq(Base):\n    def __init__(self, s): self.s = s\n    def area(self): return self.s ** 2\nassert Sq(2).describe() == 'Sq: 4.0'\nassert issubclass(Sq, Base)", "try:\n    Base().describe()\n    raise RuntimeError('no')\nexcept NotImplementedError:\n    pass"], (".1f", ".2f")),
    "an abstract class": (
        "from abc import ABC, abstractmethod\nclass Shape(ABC):\n    @abstractmethod\n    def area(self): ...\n    def twice(self): return 2 * self.area()\n",
        ["class Sq(Shape):\n    def area(self): return 4\nassert Sq().twice() == 8", "try:\n    Shape()\n    raise RuntimeError('made')\nexcept TypeError as e:\n    assert 'abstract' in str(e)"], ("    @abstractmethod\n", "")),
    "a protocol": (
        "from typing import Protocol, runtime_checkable\n@runtime_checkable\nclass Quacks(Protocol):\n    def quack(self) -> str: ...\ndef loud(x: Quacks) -> str: return x.quack().upper()\n",
        ["class Duck:\n    def quack(self): return 'q'\nassert isinstance(Duck(), Quacks) and not isinstance(3, Quacks)\nassert loud(Duck()) == 'Q'"], (".upper()", "")),
    "generics and overloads": (
        "from typing import Generic, TypeVar, overload, get_type_hints, Optional\nT = TypeVar('T')\nclass Box(Generic[T]):\n    def __init__(self, v: T): self.v = v\n    def get(self) -> T: return self.v\n@overload\ndef f(x: int) -> int: ...\n@overload\ndef f(x: str) -> str: ...\ndef f(x): return x * 2\ndef g(a: int, b: Optional[str] = None) -> bool: return True\n",
        ["assert Box[int](3).get() == 3", "assert f(2) == 4 and f('a') == 'aa'", "from typing import Optional\nimport typing\nassert typing.get_type_hints(g) == {'a': int, 'b': Optional[str], 'return': bool}"], ("x * 2", "x + x + x")),
    "exceptions of its own": (
        "class AppError(Exception):\n    def __init__(self, code, msg='x'): super().__init__(msg); self.code = code\nclass Missing(AppError, KeyError): pass\ndef find(k):\n    if k < 0: raise AppError(7, 'negative')\n    if k > 9: raise Missing(404)\n    return k\n",
        ["try:\n    find(-1)\n    assert False\nexcept AppError as e:\n    assert e.code == 7 and str(e) == 'negative' and e.args == ('negative',)", "try:\n    find(10)\nexcept KeyError as e:\n    assert isinstance(e, Missing) and e.code == 404\nelse:\n    raise RuntimeError('nothing raised')", "assert issubclass(Missing, AppError) and find(3) == 3"], ("AppError(7,", "AppError(8,")),
    "exceptions with a cause": (
        "class E(Exception): pass\ndef f():\n    try: int('x')\n    except ValueError as e: raise E('wrapped') from e\n",
        ["try:\n    f()\n    raise RuntimeError\nexcept E as e:\n    assert isinstance(e.__cause__, ValueError) and e.__traceback__ is not None"], ("from e", "from None")),
    "a traceback as text": (
        "import traceback\ndef f():\n    try: 1 / 0\n    except ZeroDivisionError: return traceback.format_exc()\n",
        ["assert 'ZeroDivisionError: division by zero' in f() and f().startswith('Traceback')"], ("traceback.format_exc()", "''")),
    "logging": (
        "import logging, io\ndef f(x):\n    s = io.StringIO()\n    log = logging.getLogger('t'); log.handlers[:] = [logging.StreamHandler(s)]; log.setLevel('INFO'); log.propagate = False\n    log.info('got %d', x)\n    try: 1 / 0\n    except ZeroDivisionError: log.exception('bad')\n    return s.getvalue()\n",
        ["assert f(3).startswith('got 3\\n') and 'ZeroDivisionError' in f(3)"], ("'got %d'", "'has %d'")),
    "warnings": (
        "import warnings\ndef old():\n    warnings.warn('use new', DeprecationWarning, stacklevel=2)\n    return 1\n",
        ["import warnings\nwith warnings.catch_warnings(record=True) as w:\n    warnings.simplefilter('always')\n    assert old() == 1\n    assert len(w) == 1 and 'use new' in str(w[0].message) and w[0].category is DeprecationWarning"], ("'use new', DeprecationWarning", "'use new', UserWarning")),
    "threads": (
        "import threading\nclass C:\n    def __init__(self): self.n, self.lock = 0, threading.Lock()\n    def inc(self):\n        for _ in range(1000):\n            with self.lock: self.n += 1\n",
        ["import threading\nc = C()\nts = [threading.Thread(target=c.inc) for _ in range(4)]\n[t.start() for t in ts]\n[t.join() for t in ts]\nassert c.n == 4000"], ("+= 1", "+= 2")),
    "a pool of threads and a queue": (
        "from concurrent.futures import ThreadPoolExecutor\nimport queue\ndef squares(xs):\n    with ThreadPoolExecutor(2) as p: return list(p.map(lambda x: x * x, xs))\ndef drain(q):\n    out = []\n    while not q.empty(): out.append(q.get())\n    return out\n",
        ["assert squares([1, 2, 3]) == [1, 4, 9]", "import queue\nq = queue.Queue()\nq.put(1); q.put(2)\nassert drain(q) == [1, 2]"], ("x * x", "x + x")),
    "callbacks": (
        "class Bus:\n    def __init__(self): self.subs = {}\n    def on(self, e, f): self.subs.setdefault(e, []).append(f)\n    def emit(self, e, *a, **k): return [f(*a, **k) for f in self.subs.get(e, [])]\n",
        ["got = []\nb = Bus()\nb.on('x', got.append)\nb.on('x', lambda v: v + 1)\nassert b.emit('x', 1) == [None, 2] and got == [1]", "class H:\n    def m(self, v): return v * 2\nb = Bus()\nb.on('y', H().m)\nassert b.emit('y', 4) == [8] and b.emit('z') == []"], (".append(f)", ".insert(0, f)")),
    "module globals": (
        "count = 0\nCACHE = {}\ndef inc():\n    global count\n    count += 1\n    return count\ndef get(k): return CACHE.setdefault(k, k * 2)\n",
        ["inc(); inc()\nassert count == 2", "count = 10\nassert inc() == 11", "get(3)\nassert CACHE == {3: 6}", "def reset():\n    global count\n    count = 0\nreset()\nassert inc() == 1"], ("k * 2", "k * 3")),
    "a setting that tests change": (
        "LIMIT = 3\ndef cut(s): return s[:LIMIT]\n",
        ["assert cut('abcdef') == 'abc'", "LIMIT = 5\nassert cut('abcdef') == 'abcde'"], ("s[:LIMIT]", "s[:3]")),
    "properties and setters": (
        "class T:\n    def __init__(self, c): self.c = c\n    @property\n    def f(self): return self.c * 9 / 5 + 32\n    @f.setter\n    def f(self, v):\n        if v < -459: raise ValueError('cold')\n        self.c = (v - 32) * 5 / 9\n    @classmethod\n    def of(cls, v): t = cls(0); t.f = v; return t\n    @staticmethod\n    def unit(): return 'C'\n",
        ["t = T(100)\nassert t.f == 212\nt.f = 32\nassert t.c == 0", "assert abs(T.of(212).c - 100) < 1e-9 and T.unit() == 'C'", "try:\n    T(0).f = -1000\n    raise RuntimeError\nexcept ValueError as e:\n    assert str(e) == 'cold'"], ("(v - 32)", "(v - 30)")),
    "descriptors": (
        "class Positive:\n    def __set_name__(self, o, n): self.n = '_' + n\n    def __get__(self, o, t=None): return self if o is None else getattr(o, self.n, 1)\n    def __set__(self, o, v):\n        if v <= 0: raise ValueError(self.n)\n        setattr(o, self.n, v)\nclass A:\n    w = Positive()\n",
        ["a = A()\nassert a.w == 1\na.w = 5\nassert a.w == 5 and a.__dict__ == {'_w': 5}", "try:\n    A().w = 0\n    raise RuntimeError\nexcept ValueError as e:\n    assert '_w' in str(e)", "assert isinstance(A.w, Positive)"], ("v <= 0", "v < 0")),
    "a metaclass": (
        "class Reg(type):\n    all = {}\n    def __new__(m, name, bases, ns):\n        cls = super().__new__(m, name, bases, ns)\n        m.all[name] = cls\n        return cls\n    def __len__(cls): return len(cls.__name__)\nclass A(metaclass=Reg): pass\n",
        ["class Bcd(A): pass\nassert Reg.all['Bcd'] is Bcd and len(Bcd) == 3 and type(A) is Reg", "assert sorted(Reg.all) == ['A', 'Bcd']"], ("m.all[name] = cls", "m.all[name] = name")),
    "a singleton": (
        "class S:\n    _i = None\n    def __new__(cls, *a):\n        if cls._i is None: cls._i = super().__new__(cls)\n        return cls._i\n",
        ["assert S() is S() and id(S()) == id(S())", "S().x = 3\nassert S().x == 3"], ("if cls._i is None: ", "")),
    "hooks of classes": (
        "class Plugin:\n    known = []\n    def __init_subclass__(cls, key=None, **k): super().__init_subclass__(**k); cls.known.append((cls.__name__, key))\n    def __class_getitem__(cls, i): return (cls.__name__, i)\n",
        ["class X(Plugin, key=1): pass\nclass Y(X, key=2): pass\nassert Plugin.known == [('X', 1), ('Y', 2)]", "assert Plugin[int] == ('Plugin', int)"], ("(cls.__name__, key)", "(cls.__name__, None)")),
    "decorators": (
        "import functools\ndef memo(f):\n    seen = {}\n    @functools.wraps(f)\n    def w(*a):\n        if a not in seen: seen[a] = f(*a)\n        return seen[a]\n    w.seen = seen\n    return w\ndef repeat(n):\n    def d(f): return lambda *a: [f(*a) for _ in range(n)]\n    return d\n",
        ["calls = []\n@memo\ndef sq(x):\n    'doc'\n    calls.append(x)\n    return x * x\nassert sq(3) == 9 and sq(3) == 9 and calls == [3] and sq.__name__ == 'sq' and sq.__doc__ == 'doc'", "@repeat(2)\ndef hi(): return 'hi'\nassert hi() == ['hi', 'hi']"], ("if a not in seen: ", "")),
    "attributes by name": (
        "class O:\n    def __init__(self, **k): self.__dict__.update(k)\n    def __getattr__(self, n):\n        if n.startswith('get_'): return lambda: self.__dict__[n[4:]]\n        raise AttributeError(n)\n    def __delattr__(self, n): self.__dict__[n] = None\n",
        ["o = O(a=1)\nassert o.get_a() == 1 and hasattr(o, 'a') and not hasattr(o, 'zz')", "o = O(b=2)\ndel o.b\nassert o.b is None and vars(o) == {'b': None}", "assert getattr(O(), 'q', 5) == 5"], ("n[4:]", "n[5:] or 'b'")),
    "pickle and copies": (
        "import pickle, copy\nclass P:\n    def __init__(self, x, items=()): self.x, self.items = x, list(items)\n    def __eq__(self, o): return isinstance(o, P) and vars(self) == vars(o)\ndef trip(o): return pickle.loads(pickle.dumps(o))\ndef deep(o): return copy.deepcopy(o)\n",
        ["p = P(1, [2])\nq = trip(p)\nassert q == p and q is not p", "p = P(1, [[2]])\nq = deep(p)\nq.items[0].append(3)\nassert p.items == [[2]] and q.items == [[2, 3]]", "import copy, pickle\np = P(1, [[2]])\nassert copy.copy(p).items is p.items\nassert pickle.loads(pickle.dumps(P(5))) == P(5)"], ("copy.deepcopy(o)", "copy.copy(o)")),
    "JSON": (
        "import json\nclass P:\n    def __init__(self, x): self.x = x\nclass Enc(json.JSONEncoder):\n    def default(self, o): return {'x': o.x} if isinstance(o, P) else super().default(o)\ndef dump(o): return json.dumps(o, cls=Enc, sort_keys=True)\n",
        ["assert dump({'b': P(1), 'a': 2}) == '{\"a\": 2, \"b\": {\"x\": 1}}'", "import json\nassert json.loads(dump([P(3)])) == [{'x': 3}]"], ("'x': o.x", "'y': o.x")),
    "regular expressions": (
        "import re\ndef words(s): return re.findall(r'\\b\\w+\\b', s)\ndef first(s): return re.search(r'(?P<y>\\d{4})-(\\d\\d)', s)\n",
        ["assert words('a bc, d') == ['a', 'bc', 'd']", "m = first('on 2020-05')\nassert m and m.group('y') == '2020' and m.groups() == ('2020', '05') and m.span() == (3, 10)", "assert first('none') is None"], ("\\d{4}", "\\d{3}")),
    "heaps and bisection": (
        "import heapq, bisect\nclass Task:\n    def __init__(self, p, n): self.p, self.n = p, n\n    def __lt__(self, o): return self.p < o.p\ndef order(ts):\n    h = list(ts); heapq.heapify(h)\n    return [heapq.heappop(h).n for _ in range(len(h))]\ndef put(xs, x): bisect.insort(xs, x)\n",
        ["assert order([Task(3, 'c'), Task(1, 'a'), Task(2, 'b')]) == ['a', 'b', 'c']", "xs = [1, 3]\nput(xs, 2)\nassert xs == [1, 2, 3]"], ("self.p < o.p", "self.p > o.p")),
    "recursion and trees": (
        "class Tree:\n    def __init__(self, v, l=None, r=None): self.v, self.l, self.r = v, l, r\n    def __iter__(self):\n        if self.l: yield from self.l\n        yield self.v\n        if self.r: yield from self.r\ndef depth(t): return 0 if t is None else 1 + max(depth(t.l), depth(t.r))\ndef ack(m, n): return n + 1 if m == 0 else ack(m - 1, 1) if n == 0 else ack(m - 1, ack(m, n - 1))\n",
        ["t = Tree(2, Tree(1), Tree(3, None, Tree(4)))\nassert list(t) == [1, 2, 3, 4] and depth(t) == 3", "assert ack(2, 3) == 9", "assert depth(None) == 0"], ("1 + max", "2 + max")),
    "linked objects with cycles": (
        "class N:\n    def __init__(self, v): self.v, self.next = v, None\ndef ring(*vs):\n    ns = [N(v) for v in vs]\n    for a, b in zip(ns, ns[1:] + ns[:1]): a.next = b\n    return ns[0]\n",
        ["r = ring(1, 2, 3)\nassert r.next.next.next is r and r.next.v == 2", "r = ring(5)\nassert r.next is r"], ("ns[1:] + ns[:1]", "ns[1:] + ns[-1:]")),
    "weak references": (
        "import weakref, gc\nclass O: pass\nclass Cache:\n    def __init__(self): self.d = weakref.WeakValueDictionary()\n    def put(self, k, o): self.d[k] = o; return o\n    def __len__(self): return len(self.d)\n",
        ["import gc\nc = Cache()\no = c.put('a', O())\nassert len(c) == 1\ndel o\ngc.collect()\nassert len(c) == 0"], ("weakref.WeakValueDictionary()", "{}")),
    "printing": (
        "def hello(n):\n    for i in range(n): print('hi', i, sep='-')\n",
        ["import io, contextlib\nb = io.StringIO()\nwith contextlib.redirect_stdout(b):\n    hello(2)\nassert b.getvalue() == 'hi-0\\nhi-1\\n'", "import sys, io\nold, sys.stdout = sys.stdout, io.StringIO()\nhello(1)\ntext, sys.stdout = sys.stdout.getvalue(), old\nassert text == 'hi-0\\n'"], ("sep='-'", "sep='+'")),
    "input": (
        "def ask(): return int(input('n? ')) + 1\n",
        ["from unittest.mock import patch\nwith patch('builtins.input', return_value='41'):\n    assert ask() == 42", "import io, sys\nsys.stdin = io.StringIO('7\\n')\nassert ask() == 8"], ("+ 1", "+ 2")),
    "files": (
        "import os, tempfile\ndef save(path, lines):\n    with open(path, 'w') as f: f.writelines(l + '\\n' for l in lines)\ndef load(path): return [l.rstrip() for l in open(path)]\n",
        ["import tempfile, os\nwith tempfile.TemporaryDirectory() as d:\n    p = os.path.join(d, 'x')\n    save(p, ['a', 'b'])\n    assert load(p) == ['a', 'b'] and os.path.exists(p)"], ("l + '\\n'", "l + l + '\\n'")),
    "a database in memory": (
        "import sqlite3\ndef db():\n    c = sqlite3.connect(':memory:')\n    c.execute('create table t (a int, b text)')\n    c.executemany('insert into t values (?, ?)', [(1, 'x'), (2, 'y')])\n    return c\n",
        ["assert db().execute('select b from t where a = 2').fetchone() == ('y',)", "assert db().execute('select count(*) from t').fetchone()[0] == 2"], ("(2, 'y')", "(2, 'z')")),
    "single dispatch and pattern matching": (
        "from functools import singledispatch, cached_property\n@singledispatch\ndef show(x): return 'any'\n@show.register\ndef _(x: int): return 'int'\nclass P:\n    __match_args__ = ('x', 'y')\n    def __init__(self, x, y): self.x, self.y = x, y\n    @cached_property\n    def s(self): return self.x + self.y\ndef where(p):\n    match p:\n        case P(0, 0): return 'origin'\n        case P(x, 0): return f'x{x}'\n        case _: return 'else'\n",
        ["assert show(1) == 'int' and show('a') == 'any'", "assert [where(p) for p in (P(0, 0), P(3, 0), P(1, 1), 5)] == ['origin', 'x3', 'else', 'else']", "p = P(1, 2)\nassert p.s == 3 and 's' in vars(p)"], ("'origin'", "'zero'")),
    "a program that uses frames to name its callers": (
        "import inspect, sys\ndef me(): return sys._getframe().f_code.co_name\nclass T:\n    def where(self): return inspect.currentframe().f_code.co_name\n",
        ["assert me() == 'me'", "assert T().where() == 'where'"], ("def me(): return sys._getframe()", "def me(): return (lambda: sys._getframe())()")),
    "monkey patches of its own class": (
        "class A:\n    def f(self): return 1\ndef patch(): A.f = lambda self: 2\n",
        ["a = A()\nassert a.f() == 1\npatch()\nassert a.f() == 2", "setattr(A, 'g', lambda self: 9)\nassert A().g() == 9"], ("self: 2", "self: 3")),
    "a name of Python's that it redefines": ("def sum(a, b): return a + b", ["assert sum(10, 15) == 25", "assert sum(2, 4) == 6"], ("a + b", "a - b")),
    "a class named like one of the library's": (
        "class Counter:\n    def __init__(self): self.n = 0\n    def hit(self, k=1): self.n += k; return self.n\n",
        ["c = Counter()\nc.hit(); c.hit(4)\nassert c.n == 5", "c = Counter()\nassert c.hit() == 1 and len([c]) == 1"], ("+= k", "-= k")),
    "a global named like a module": ("queue = []\ndef push(x): queue.append(x)\n", ["push(1); push(2)\nassert queue == [1, 2]", "assert queue.pop() == 2"], (".append(x)", ".insert(0, x)")),
    "a setup that uses the program": (
        "class Bank:\n    def __init__(self): self.b = {}\n    def put(self, k, n): self.b[k] = self.b.get(k, 0) + n\n",
        ["bank = Bank()\nbank.put('a', 5)", "bank.put('a', 1)\nassert bank.b == {'a': 6}", "bank.put('b', 2)\nassert bank.b == {'a': 6, 'b': 2}"], (", 0) + n", ", 1) + n")),
}  # fmt: skip
