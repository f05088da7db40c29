"""Right programs whose values are of classes of their own: name, program, tests, and what makes the program wrong."""

from __future__ import annotations

FAIR: dict[str, tuple[str, str | list[str], tuple[str, str]]] = {
    "a named tuple equals a tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(a): return P(a, a + 1)",
        ["assert f(1) == (1, 2)", "assert f(1) == P(1, 2)", "assert f(3).y == 4 and f(3)[0] == 3", "x, y = f(5)\nassert (x, y) == (5, 6)",
         "assert isinstance(f(1), tuple) and f(1)._asdict() == {'x': 1, 'y': 2}"], ("a + 1", "a + 2")),
    "typing.NamedTuple": (
        "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int = 7\n    def total(self): return self.x + self.y\n",
        ["assert P(1) == (1, 7)", "assert P(1).total() == 8", "assert P(1, 2)._replace(x=5) == P(5, 2)"], ("= 7", "= 8")),
    "an enum": (
        "from enum import Enum\nclass Color(Enum):\n    RED = 1\n    BLUE = 2\ndef pick(n): return Color.RED if n < 5 else Color.BLUE",
        ["assert pick(1) == Color.RED", "assert pick(9) is Color.BLUE", "assert Color(1) is Color.RED and Color['BLUE'].value == 2",
         "assert [c.name for c in Color] == ['RED', 'BLUE']", "assert pick(1) in (Color.RED, Color.BLUE) and pick(1) != Color.BLUE"], ("n < 5", "n > 5")),
    "an IntEnum": (
        "from enum import IntEnum\nclass Level(IntEnum):\n    LOW = 1\n    HIGH = 3\ndef level(n): return Level.HIGH if n > 2 else Level.LOW",
        ["assert level(3) == 3", "assert level(1) < level(5)", "assert level(1) + 1 == 2 and sorted([level(9), level(0)]) == [1, 3]"], ("n > 2", "n < 2")),
    "an enum of text": (
        "from enum import Enum\nclass S(str, Enum):\n    A = 'a'\n    B = 'b'\ndef f(x): return S(x.lower())",
        ["assert f('A') == 'a'", "assert f('B') is S.B", "assert f('A').upper() == 'A'"], (".lower()", ".lower()[0:0] + 'b'")),
    "an enum of flags": (
        "from enum import Flag, auto\nclass P(Flag):\n    R = auto()\n    W = auto()\ndef both(): return P.R | P.W",
        ["assert both() & P.R == P.R", "assert P.W in both() and bool(both() & ~P.R)", "assert both().value == 3"], ("P.R | P.W", "P.R & P.W")),
    "a subclass of str": (
        "class Name(str):\n    def shout(self): return Name(self.upper() + '!')\n",
        ["assert Name('a').shout() == 'A!'", "assert Name('x') + 'y' == 'xy'", "assert isinstance(Name('q').shout(), Name)", "assert len(Name('abc')) == 3"], ("+ '!'", "+ '?'")),
    "a str that compares without case": (
        "class Ci(str):\n    def __eq__(self, other): return isinstance(other, str) and self.lower() == other.lower()\n"
        "    def __hash__(self): return hash(self.lower())\n",
        ["assert Ci('Hello') == 'hELLO'", "assert Ci('a') != 'b' and not Ci('a') == 'b'", "assert {Ci('A'): 1}[Ci('a')] == 1"], ("self.lower() == other.lower()", "str(self) == str(other)")),
    "a subclass of int": (
        "class Mod7(int):\n    def __new__(cls, n): return int.__new__(cls, n % 7)\n    def __add__(self, other): return Mod7(int(self) + int(other))\n",
        ["assert Mod7(10) == 3", "assert Mod7(5) + 4 == 2", "assert Mod7(6) + Mod7(6) == Mod7(5)"], ("n % 7", "n % 8")),
    "a subclass of float": (
        "class Celsius(float):\n    @property\n    def fahrenheit(self): return self * 9 / 5 + 32\n",
        ["assert Celsius(100).fahrenheit == 212", "assert Celsius(1.5) == 1.5 and abs(Celsius(-2.5)) == 2.5", "assert round(Celsius(36.66), 1) == 36.7"], ("+ 32", "+ 30")),
    "a subclass of list": (
        "class Stack(list):\n    def push(self, x): self.append(x); return self\n    def peek(self): return self[-1]\n",
        ["s = Stack()\ns.push(1).push(2)\nassert s == [1, 2] and s.peek() == 2 and len(s) == 2", "assert Stack([1]) + [2] == [1, 2]", "assert sorted(Stack([3, 1])) == [1, 3]"], ("self[-1]", "self[0]")),
    "a subclass of dict": (
        "class Bag(dict):\n    def __missing__(self, key): return 0\n    def put(self, key): self[key] += 1\n",
        ["b = Bag()\nb.put('x'); b.put('x')\nassert b == {'x': 2} and b['y'] == 0", "assert dict(Bag(a=1)) == {'a': 1} and 'a' in Bag(a=1)"], ("+= 1", "+= 2")),
    "a dict that compares itself": (
        "class D(dict):\n    def __eq__(self, other): return sorted(self) == sorted(other)\n    def __ne__(self, other): return not self == other\n",
        ["assert D(a=1) == {'a': 2}", "assert D(a=1) != {'b': 1}", "assert D() == {}"], ("sorted(self) == sorted(other)", "dict.__eq__(self, other)")),
    "a subclass of set": (
        "class Tags(set):\n    def add(self, x): super().add(x.lower())\n",
        ["t = Tags()\nt.add('A'); t.add('a')\nassert t == {'a'} and len(t) == 1", "assert Tags({1}) | {2} == {1, 2}"], ("x.lower()", "x")),
    "a subclass of tuple": (
        "class V(tuple):\n    def __add__(self, other): return V(a + b for a, b in zip(self, other))\n    def __neg__(self): return V(-a for a in self)\n",
        ["assert V((1, 2)) + V((3, 4)) == (4, 6)", "assert -V((1, 2)) == V((-1, -2))", "assert V((1, 2))[0] == 1"], ("a + b for", "a - b for")),
    "UserDict and UserList": (
        "from collections import UserDict, UserList\nclass U(UserDict):\n    def __setitem__(self, k, v): super().__setitem__(k.upper(), v)\nclass L(UserList): pass\n",
        ["u = U(a=1)\nu['b'] = 2\nassert u == {'A': 1, 'B': 2}", "assert L([1]) + [2] == [1, 2]", "assert list(u) == ['A', 'B']"], ("k.upper()", "k")),
    "operators between objects": (
        "class V:\n    def __init__(self, x, y): self.x, self.y = x, y\n    def __add__(self, o): return V(self.x + o.x, self.y + o.y)\n"
        "    def __mul__(self, k): return V(self.x * k, self.y * k) if isinstance(k, (int, float)) else self.x * k.x + self.y * k.y\n    __rmul__ = __mul__\n"
        "    def __eq__(self, o): return isinstance(o, V) and (self.x, self.y) == (o.x, o.y)\n    def __hash__(self): return hash((self.x, self.y))\n"
        "    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5\n    def __neg__(self): return V(-self.x, -self.y)\n    def __bool__(self): return bool(self.x or self.y)\n",
        ["assert V(1, 2) + V(3, 4) == V(4, 6)", "assert V(1, 2) * 2 == V(2, 4) and 3 * V(1, 1) == V(3, 3)", "assert V(1, 2) * V(3, 4) == 11",
         "assert abs(V(3, 4)) == 5", "assert -V(1, 2) == V(-1, -2)", "assert V(0, 1) and not V(0, 0)", "assert V(1, 2) != V(2, 1)"], ("self.x + o.x", "self.x - o.x")),
    "floor division, modulo, powers and shifts": (
        "class N:\n    def __init__(self, n): self.n = n\n    def __floordiv__(self, o): return N(self.n // o.n)\n    def __mod__(self, o): return N(self.n % o.n)\n"
        "    def __pow__(self, k): return N(self.n ** k)\n    def __lshift__(self, k): return N(self.n << k)\n    def __divmod__(self, o): return self // o, self % o\n"
        "    def __invert__(self): return N(~self.n)\n    def __eq__(self, o): return self.n == (o.n if isinstance(o, N) else o)\n",
        ["assert N(7) // N(2) == N(3)", "assert N(7) % N(4) == 3", "assert N(2) ** 10 == 1024", "assert N(1) << 4 == 16", "assert divmod(N(7), N(2)) == (N(3), N(1))", "assert ~N(0) == -1"],
        ("self.n // o.n", "self.n - o.n")),
    "or, and, xor": (
        "class B:\n    def __init__(self, *s): self.s = frozenset(s)\n    def __or__(self, o): return B(*self.s | o.s)\n    def __and__(self, o): return B(*self.s & o.s)\n"
        "    def __xor__(self, o): return B(*self.s ^ o.s)\n    def __eq__(self, o): return self.s == o.s\n    def __le__(self, o): return self.s <= o.s\n",
        ["assert B(1) | B(2) == B(1, 2)", "assert B(1, 2) & B(2) == B(2)", "assert B(1, 2) ^ B(2, 3) == B(1, 3)", "assert B(1) <= B(1, 2) and not B(3) <= B(1)"], ("self.s | o.s", "self.s & o.s")),
    "in-place operators": (
        "class Acc:\n    def __init__(self): self.items = []\n    def __iadd__(self, x): self.items.append(x); return self\n    def __len__(self): return len(self.items)\n",
        ["a = Acc()\nb = a\na += 1\na += 2\nassert a is b and len(a) == 2 and a.items == [1, 2]"], ("return self", "return Acc()")),
    "reflected operators": (
        "class M:\n    def __init__(self, v): self.v = v\n    def __radd__(self, o): return M(o + self.v)\n    def __rsub__(self, o): return M(o - self.v)\n    def __add__(self, o): return M(self.v + o.v)\n",
        ["assert (10 - M(3)).v == 7", "assert (1 + M(2)).v == 3", "assert sum([M(1), M(2)]).v == 3"], ("o - self.v", "self.v - o")),
    "matrix multiplication": (
        "class Mat:\n    def __init__(self, r): self.r = r\n    def __matmul__(self, o): return Mat([[sum(a * b for a, b in zip(x, y)) for y in zip(*o.r)] for x in self.r])\n"
        "    def __eq__(self, o): return self.r == o.r\n    def __getitem__(self, ij): return self.r[ij[0]][ij[1]]\n",
        ["assert Mat([[1, 2]]) @ Mat([[3], [4]]) == Mat([[11]])", "m = Mat([[1, 2], [3, 4]])\nassert (m @ m)[1, 0] == 15 and m[0, 1] == 2"], ("a * b for", "a + b for")),
    "round, format, int, float, index": (
        "class Q:\n    def __init__(self, v): self.v = v\n    def __round__(self, n=0): return Q(round(self.v, n))\n    def __format__(self, s): return 'Q' + format(self.v, s)\n"
        "    def __int__(self): return int(self.v)\n    def __float__(self): return float(self.v)\n    def __index__(self): return int(self.v)\n    def __trunc__(self): return int(self.v)\n    def __str__(self): return f'<{self.v}>'\n    def __repr__(self): return f'Q({self.v})'\n",
        ["assert round(Q(2.456), 1).v == 2.5", "assert format(Q(2.5), '.2f') == 'Q2.50' and f'{Q(3):d}' == 'Q3'", "assert int(Q(2.9)) == 2 and float(Q(2)) == 2.0",
         "assert [10, 20, 30][Q(1)] == 20", "assert str(Q(1)) == '<1>' and repr([Q(2)]) == '[Q(2)]' and '%s' % Q(4) == '<4>'"], ("'Q' +", "'R' +")),
    "len, contains, iteration, reversal, slices": (
        "class Seq:\n    def __init__(self, *i): self.i = list(i)\n    def __len__(self): return len(self.i)\n    def __contains__(self, x): return x in self.i\n"
        "    def __iter__(self): return iter(self.i)\n    def __reversed__(self): return iter(self.i[::-1])\n    def __getitem__(self, k): return Seq(*self.i[k]) if isinstance(k, slice) else self.i[k]\n",
        ["s = Seq(1, 2, 3)\nassert len(s) == 3 and 2 in s and 9 not in s", "assert list(Seq(1, 2)) == [1, 2] and list(reversed(Seq(1, 2))) == [2, 1]", "assert list(Seq(1, 2, 3)[1:]) == [2, 3]",
         "assert [x * 2 for x in Seq(1, 2)] == [2, 4] and sum(Seq(4, 5)) == 9 and max(Seq(3, 8)) == 8", "a, *b = Seq(1, 2, 3)\nassert b == [2, 3]"], ("self.i[::-1]", "self.i")),
    "objects that hash, in sets and as keys": (
        "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return isinstance(o, P) and o.x == self.x\n    def __hash__(self): return hash(self.x)\n"
        "def unique(items): return set(items)\n",
        ["assert len(unique([P(1), P(1), P(2)])) == 2", "assert unique([P(1)]) == {P(1)}", "assert {P(1): 'a'}[P(1)] == 'a' and hash(P(3)) == hash(P(3))", "assert P(5) in unique([P(5)])"], ("set(items)", "set(items[:1] * 3)")),
    "order by functools.total_ordering": (
        "from functools import total_ordering\n@total_ordering\nclass V:\n    def __init__(self, s): self.t = tuple(map(int, s.split('.')))\n    def __eq__(self, o): return self.t == o.t\n    def __lt__(self, o): return self.t < o.t\n",
        ["assert V('1.2') < V('1.10') and V('2.0') >= V('1.9')", "assert max(V('1.2'), V('1.10')).t == (1, 10)", "assert [v.t for v in sorted([V('2.0'), V('1.0')])] == [(1, 0), (2, 0)]", "assert V('1.0') == V('1.0')"], ("map(int, s.split('.'))", "s.split('.')")),
    "an object that equals a number": (
        "class Money:\n    def __init__(self, c): self.c = c\n    def __eq__(self, o): return self.c == (o.c if isinstance(o, Money) else o * 100)\n    def __add__(self, o): return Money(self.c + o.c)\n    def __lt__(self, o): return self.c < (o.c if isinstance(o, Money) else o * 100)\n    def __ge__(self, o): return not self < o\n",
        ["assert Money(500) == 5", "assert Money(100) + Money(250) == Money(350)", "assert Money(100) < 2 and Money(300) >= 2", "assert not Money(100) == 2 and Money(100) != 3"], ("self.c + o.c", "self.c")),
    "equality that raises for strangers": (
        "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, other): return self.x == other.x\n",
        ["assert P(1) == P(1)", "assert not P(1) == P(2)", "assert [P(1), P(2)] == [P(1), P(2)]", "assert P(3) in [P(1), P(3)]"], ("self.x == other.x", "self.x is None")),
    "identity": (
        "class Node: pass\nROOT = Node()\ndef root(): return ROOT\ndef fresh(): return Node()\ndef same(x): return x\n",
        ["assert root() is root() and root() is ROOT", "assert fresh() is not fresh()", "n = Node()\nassert same(n) is n", "x = [1]\nassert same(x) is x"], ("return x", "return type(x)()")),
    "arguments changed in place and aliased": (
        "def fill(a, b):\n    a.append(1)\n    b['k'] = a\n    return a\n",
        ["x, d = [], {}\nr = fill(x, d)\nassert r is x and d['k'] is x and x == [1]", "a = [5]\nb = [a, a]\nfill(b[0], {})\nassert b == [[5, 1], [5, 1]]"], ("a.append(1)", "a = a + [1]")),
    "the name of a type, issubclass, isinstance": (
        "class A: pass\nclass B(A): pass\ndef make(n): return B() if n else A()\n",
        ["assert type(make(1)).__name__ == 'B'", "assert issubclass(B, A) and not issubclass(A, B)", "assert isinstance(make(1), A) and type(make(0)) is A", "assert make(1).__class__.__mro__[1] is A and B.__bases__ == (A,)"], ("class B(A)", "class B")),
    "data classes": (
        "from dataclasses import dataclass, field, asdict, replace\n@dataclass(order=True)\nclass I:\n    name: str\n    n: int = 0\n    tags: list = field(default_factory=list)\n    def more(self): return replace(self, n=self.n + 1)\n",
        ["assert I('a') == I('a', 0, [])", "assert I('a').more() == I('a', 1)", "assert asdict(I('a')) == {'name': 'a', 'n': 0, 'tags': []}", "assert I('a') < I('b') and repr(I('q')) == \"I(name='q', n=0, tags=[])\""], ("self.n + 1", "self.n - 1")),
    "frozen data classes with slots": (
        "from dataclasses import dataclass, FrozenInstanceError\n@dataclass(frozen=True, slots=True)\nclass P:\n    x: int\n    y: int = 2\n    @property\n    def s(self): return self.x * self.y\n",
        ["assert P(3).s == 6", "assert len({P(1), P(1)}) == 1", "try:\n    P(1).x = 5\n    raise RuntimeError('changed')\nexcept FrozenInstanceError:\n    pass", "assert not hasattr(P(1), '__dict__')"], ("frozen=True", "frozen=False")),
    "objects compared with None": (
        "class N:\n    def __init__(self, v, n=None): self.v, self.next = v, n\ndef last(n):\n    while n.next is not None: n = n.next\n    return n\n",
        ["a = N(1, N(2))\nassert last(a).v == 2 and last(a).next is None", "assert N(1) is not None and N(1) != None and not N(1) == None", "b = N(3)\nassert last(b) is b"], ("return n\n", "return N(n.v, n)\n")),
    "complex numbers, bytes and big integers": (
        "def c(): return complex(1, 2) * 1j\ndef b(): return bytes([1, 2]) + b'x'\ndef big(): return 2 ** 200 + 1\ndef ba(): return bytearray(b'ab')\n",
        ["assert c() == -2 + 1j", "assert b() == b'\\x01\\x02x' and ba() == b'ab'", "assert big() == 1606938044258990275541962092341162602522202993782792835301377", "assert big() % 2 == 1"], ("2 ** 200", "2 ** 201")),
    "not a number and infinity": (
        "import math\ndef n(): return float('nan')\ndef i(): return -math.inf\n",
        ["assert n() != n() and math.isnan(n())", "assert i() == float('-inf') and i() < -1e308", "assert str(n()) == 'nan'"], ("-math.inf", "math.inf")),
    "decimals, fractions and dates": (
        "from decimal import Decimal\nfrom fractions import Fraction\nimport datetime\ndef d(): return Decimal('0.1') + Decimal('0.2')\ndef f(): return Fraction(1, 3) + Fraction(1, 6)\ndef t(): return datetime.datetime(2020, 2, 28) + datetime.timedelta(days=2)\n",
        ["assert d() == Decimal('0.3')", "assert f() == Fraction(1, 2) and f() == 0.5", "assert t() == datetime.datetime(2020, 3, 1) and t().strftime('%d.%m') == '01.03'", "assert (t() - datetime.datetime(2020, 1, 1)).days == 60"], ("days=2", "days=3")),
    "standard containers": (
        "from collections import Counter, deque, OrderedDict, defaultdict\ndef c(s): return Counter(s)\ndef q(n): return deque(range(n), maxlen=2)\ndef o(): return OrderedDict(b=1, a=2)\ndef dd():\n    d = defaultdict(list)\n    d['x'].append(1)\n    return d\n",
        ["assert c('aab') == {'a': 2, 'b': 1} and c('aab').most_common(1) == [('a', 2)]", "assert q(5) == deque([3, 4]) and list(q(5)) == [3, 4]", "assert list(o()) == ['b', 'a']", "assert dd() == {'x': [1]}"], ("maxlen=2", "maxlen=3")),
    "functions with attributes, closures and partials": (
        "from functools import partial\ndef counter():\n    n = 0\n    def step(k=1):\n        nonlocal n\n        n += k\n        return n\n    step.start = 0\n    return step\ndouble = partial(lambda a, b: a * b, 2)\n",
        ["c = counter()\nassert c() == 1 and c(5) == 6 and c.start == 0", "assert double(4) == 8 and double.args == (2,)", "assert counter().__name__ == 'step'"], ("n += k", "n -= k")),
    "iterators that a test uses up": (
        "def it(): return iter([1, 2])\ndef g(n):\n    for i in range(n): yield i\n",
        ["i = it()\nassert next(i, None) == 1 and next(i, None) == 2 and next(i, 'e') == 'e'", "assert 2 in it() and 5 not in it()", "assert sum(it(), 10) == 13 and list(zip(it(), 'ab')) == [(1, 'a'), (2, 'b')]", "assert tuple(filter(None, g(3))) == (1, 2)"], ("[1, 2]", "[1, 3]")),
    "equality within a tolerance": (
        "class A:\n    def __init__(self, v): self.v = v\n    def __eq__(self, o): return abs(self.v - (o.v if isinstance(o, A) else o)) < 1e-6\n",
        ["assert A(1.0) == 1.0000000001", "assert A(2) == A(2.0000000001)", "assert not A(1) == 1.1"], ("< 1e-6", "> 1e-6")),
    "expressions instead of truth values": (
        "class F:\n    def __init__(self, n): self.n = n\n    def __eq__(self, o): return ('eq', self.n, o)\n    __hash__ = None\n",
        ["assert (F('a') == 3) == ('eq', 'a', 3)"], ("self.n, o)", "o, self.n)")),
    "an interval": (
        "class R:\n    def __init__(self, a, b): self.a, self.b = a, b\n    def __contains__(self, x): return self.a <= x < self.b\n",
        ["assert 5 in R(0, 10) and 10 not in R(0, 10)", "assert all(x in R(0, 3) for x in range(3))", "assert 50 in R(0, 1000000)"], ("x < self.b", "x <= self.b")),
    "unhashable, callable and truth": (
        "class F:\n    __hash__ = None\n    def __call__(self, *a, k=1): return sum(a) * k\n    def __len__(self): return 0\n",
        ["assert F()(1, 2, k=3) == 9 and callable(F())", "assert not F()", "try:\n    hash(F())\n    raise RuntimeError\nexcept TypeError:\n    pass"], ("sum(a) * k", "sum(a) + k")),
    "a dictionary with a default": (
        "from collections import defaultdict\ndef f():\n    d = defaultdict(list)\n    d[1].append(2)\n    return d",
        ["assert f() == {1: [2]} and f()[5] == []"], ("(list)", "(int, {1: [2]})")),
    "keys of a dictionary": (
        "def f(d): return d.keys()", ["assert f({1: 2}) == {1}", "assert list(f({2: 1, 1: 2})) == [2, 1]", "assert f({1: 2}) & {1} == {1}"], ("keys", "values")),
}  # fmt: skip
