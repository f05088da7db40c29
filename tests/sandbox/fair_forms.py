"""Right programs under tests in the forms of benchmarks and of real projects: name, program, tests, and what makes them wrong."""

from __future__ import annotations

from typing import Any

_STACK = (
    "class Empty(Exception): pass\nclass Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
    "    def pop(self):\n        if not self.items: raise Empty('empty')\n        return self.items.pop()\n    def __len__(self): return len(self.items)\n"
    "    def __repr__(self): return f'Stack({self.items})'\n"
)
_CASE = "import unittest\nclass TestStack(unittest.TestCase):\n    def setUp(self):\n        self.s = Stack()\n"
_POP = "    def test_pop(self):\n        self.s.push(1); self.s.push(2)\n        self.assertEqual(self.s.pop(), 2)\n        self.assertEqual(len(self.s), 1)\n"
_RAISES = "    def test_empty(self):\n        with self.assertRaises(Empty) as c:\n            self.s.pop()\n        self.assertEqual(str(c.exception), 'empty')\n"
_SWAP = ("self.items.pop()", "self.items.pop(0)")
_ADD = "def add(a, b):\n    return a + b\n"
_MINUS = ("a + b", "a - b")

FAIR: dict[str, tuple[str, Any, tuple[str, str]]] = {
    "unittest with unittest.main at its end": (_STACK, _CASE + _POP + "if __name__ == '__main__':\n    unittest.main()", _SWAP),
    "unittest.main with arguments": (_STACK, _CASE + _POP + "unittest.main(argv=['x'], exit=False, verbosity=2)", _SWAP),
    "cases that nobody runs": (_STACK, _CASE + _POP, _SWAP),
    "assertRaises and an exception's text": (_STACK, _CASE + _RAISES, ("Empty('empty')", "Empty('none')")),
    "a suite that the test runs": (
        _STACK, _CASE + _POP + "suite = unittest.TestLoader().loadTestsFromTestCase(TestStack)\nresult = unittest.TextTestRunner().run(suite)\nassert result.wasSuccessful()", _SWAP),
    "assertRaises called with a function": (_STACK, _CASE + "    def test(self):\n        self.assertRaises(Empty, self.s.pop)\n        self.assertRaisesRegex(Empty, 'emp', self.s.pop)", ("raise Empty('empty')", "return None")),
    "class-level set-up and clean-up": (
        _STACK, "import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls): cls.s = Stack(); cls.s.push(5)\n    def setUp(self): self.addCleanup(lambda: None)\n    def tearDown(self): self.s.push(9)\n"
        "    def test_a(self): self.assertEqual(self.s.pop(), 5)\n    def test_b(self): self.assertEqual(self.s.pop(), 9)\n", (_SWAP[0], "self.items[0]")),
    "many assertions of unittest": (
        _STACK, _CASE + "    def test(self):\n        s = self.s\n        self.assertFalse(s); s.push([1]); self.assertTrue(s)\n        self.assertIsInstance(s, Stack); self.assertIs(s, self.s); self.assertIsNone(s.push(2))\n"
        "        self.assertIn([1], s.items); self.assertNotIn(7, s.items); self.assertListEqual(s.items, [[1], 2])\n        self.assertGreater(len(s), 1); self.assertLessEqual(len(s), 2); self.assertNotEqual(s, Stack())\n"
        "        self.assertCountEqual(s.items, [2, [1]]); self.assertRegex(repr(s), r'^Stack'); self.assertAlmostEqual(len(s) / 3, 0.6666667)\n        self.assertDictEqual({1: len(s)}, {1: 2}); self.assertIsNot(s, Stack()); self.assertEqual(repr(s), 'Stack([[1], 2])', 'text')\n",
        ("self.items.append(x)", "self.items.insert(0, x)")),
    "sub-tests": (_ADD, "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        for a, b, c in [(1, 2, 3), (2, 2, 4), (0, 0, 0)]:\n            with self.subTest(a=a, b=b):\n                self.assertEqual(add(a, b), c)", _MINUS),
    "skips and expected failures": (
        _ADD, "import unittest\nclass T(unittest.TestCase):\n    @unittest.skip('later')\n    def test_skip(self): self.fail()\n    @unittest.expectedFailure\n    def test_bad(self): self.assertEqual(add(1, 1), 3)\n    def test(self): self.assertEqual(add(1, 2), 3)", _MINUS),
    "asynchronous cases": (
        "import asyncio\nasync def twice(x):\n    await asyncio.sleep(0)\n    return x * 2\n",
        "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n    async def asyncSetUp(self): self.x = 4\n    async def test(self):\n        self.assertEqual(await twice(self.x), 8)", ("x * 2", "x * 3")),
    "a mock of a dependency": (
        "class Service:\n    def __init__(self, db): self.db = db\n    def name(self, i):\n        row = self.db.fetch(i)\n        return row['name'].title() if row else None\n",
        "import unittest\nfrom unittest.mock import Mock\nclass T(unittest.TestCase):\n    def test(self):\n        db = Mock()\n        db.fetch.return_value = {'name': 'ann'}\n        self.assertEqual(Service(db).name(3), 'Ann')\n        db.fetch.assert_called_once_with(3)\n        db.fetch.return_value = None\n        self.assertIsNone(Service(db).name(4))", ("fetch(i)", "fetch(i + 1)")),
    "patch.object of the program's class": (
        "class Clock:\n    def now(self): return 1\ndef stamp(c): return f't{c.now()}'\n",
        "from unittest.mock import patch\nwith patch.object(Clock, 'now', return_value=7) as m:\n    assert stamp(Clock()) == 't7'\n    assert m.called\nassert stamp(Clock()) == 't1'", ("f't{", "f'u{")),
    "a base class of cases": (
        _ADD, "import unittest\nclass Base(unittest.TestCase):\n    def same(self, got, want): self.assertEqual(got, want)\nclass T(Base):\n    def test(self): self.same(add(2, 3), 5)\n", _MINUS),
    "a harness like ClassEval's": (
        "class BankAccount:\n    def __init__(self, balance=0): self.balance = balance\n    def deposit(self, amount):\n        if amount < 0: raise ValueError('Invalid amount')\n        self.balance += amount\n        return self.balance\n"
        "    def withdraw(self, amount):\n        if amount > self.balance: raise ValueError('Insufficient balance.')\n        self.balance -= amount\n        return self.balance\n    def transfer(self, other, amount):\n        self.withdraw(amount); other.deposit(amount)\n",
        "import unittest\nclass BankAccountTestTransfer(unittest.TestCase):\n    def test_transfer(self):\n        a, b = BankAccount(800), BankAccount(1000)\n        a.transfer(b, 300)\n        self.assertEqual(a.balance, 500)\n        self.assertEqual(b.balance, 1300)\n"
        "    def test_bad(self):\n        with self.assertRaises(ValueError) as context:\n            BankAccount(1).withdraw(2)\n        self.assertEqual(str(context.exception), 'Insufficient balance.')\n", ("self.balance -= amount", "self.balance += amount")),
    "a harness like BigCodeBench's": (
        "import csv, io, collections\ndef task_func(text):\n    rows = list(csv.DictReader(io.StringIO(text)))\n    return collections.Counter(r['k'] for r in rows)\n",
        "import unittest\nfrom collections import Counter\nclass TestCases(unittest.TestCase):\n    def test_case_1(self):\n        r = task_func('k,v\\na,1\\nb,2\\na,3\\n')\n        self.assertEqual(r, Counter({'a': 2, 'b': 1}))\n        self.assertIsInstance(r, Counter)\n    def test_case_2(self):\n        self.assertEqual(task_func('k,v\\n'), Counter())\n", ("r['k']", "r['v']")),
    "a harness like HumanEval's": (
        "def has_close(numbers, threshold):\n    s = sorted(numbers)\n    return any(b - a < threshold for a, b in zip(s, s[1:]))\n",
        ["METADATA = {'author': 'x'}\ndef check(candidate):\n    assert candidate([1.0, 2.0, 3.9], 0.3) == False\n    assert candidate([1.0, 2.0, 2.1], 0.3) == True\ncheck(has_close)"], ("< threshold", "> threshold")),
    "HumanEval's loops and messages": (
        "def enc(s): return ''.join(chr((ord(c) - 97 + 5) % 26 + 97) for c in s)\ndef dec(s): return ''.join(chr((ord(c) - 97 - 5) % 26 + 97) for c in s)\n",
        ["def check(candidate):\n    from random import randint, choice\n    import string\n    for _ in range(20):\n        s = ''.join(choice(string.ascii_lowercase) for i in range(randint(1, 9)))\n        assert candidate(enc(s)) == s, 'Error'\ncheck(dec)"], ("- 97 - 5", "- 97 - 4")),
    "assertions within a tolerance": (
        "def mean(xs): return sum(xs) / len(xs)\n",
        ["assert abs(mean([1, 2]) - 1.5) < 1e-9", "import math\nassert math.isclose(mean([0.1, 0.2]), 0.15, rel_tol=1e-9)", "assert round(mean([1, 1, 2]), 2) == 1.33", "assert 1.4 < mean([1, 2]) < 1.6"], ("/ len(xs)", "/ (len(xs) + 1)")),
    "functions like pytest's": (_ADD, "def test_small():\n    assert add(1, 2) == 3\ndef test_text():\n    assert add('a', 'b') == 'ab'\n", _MINUS),
    "functions that the test calls": (_ADD, "def test_small():\n    assert add(1, 2) == 3\ndef test_big():\n    for i in range(50):\n        assert add(i, i) == 2 * i\ntest_small()\ntest_big()\n", _MINUS),
    "a table of cases": (_ADD, "cases = [((1, 2), 3), ((0, 0), 0), ((-1, 1), 0)]\nfor args, want in cases:\n    got = add(*args)\n    assert got == want, f'{args}: {got} is not {want}'", _MINUS),
    "all in a comprehension": (_ADD, ["assert all(add(a, b) == c for a, b, c in [(1, 2, 3), (4, 5, 9)])", "assert [add(i, 1) for i in range(3)] == [1, 2, 3]", "assert list(map(add, [1, 2], [3, 4])) == [4, 6]"], _MINUS),
    "if and raise": (_ADD, ["if add(1, 2) != 3:\n    raise AssertionError('no')", "result = add(2, 2)\nif not result == 4:\n    raise Exception('wrong: %r' % result)"], _MINUS),
    "or, conditional expressions, walrus": (_ADD, ["assert add(1, 1) == 2 or add(1, 1) == '2'", "assert (r := add(2, 3)) == 5 and r + 1 == 6", "assert (add(1, 2) if True else 0) == 3", "assert not add(1, -1) and add(0, 1)"], _MINUS),
    "expected exceptions without a framework": (
        "def div(a, b):\n    if b == 0: raise ZeroDivisionError('no')\n    return a / b\n",
        ["try:\n    div(1, 0)\n    assert False, 'must raise'\nexcept ZeroDivisionError as e:\n    assert str(e) == 'no'", "raised = False\ntry:\n    div(1, 0)\nexcept ArithmeticError:\n    raised = True\nassert raised and div(4, 2) == 2"], ("raise ZeroDivisionError('no')", "return 0")),
    "a failing assertion that is expected": (
        "def check_positive(x):\n    assert x > 0, 'positive please'\n    return x\n",
        ["try:\n    check_positive(-1)\nexcept AssertionError as e:\n    assert 'positive' in str(e)\nelse:\n    raise RuntimeError('none')", "assert check_positive(3) == 3"], ("x > 0", "x > -5")),
    "doctests": (
        'def add(a, b):\n    """Sum.\n\n    >>> add(1, 2)\n    3\n    >>> add("a", "b")\n    \'ab\'\n    """\n    return a + b\n',
        "import doctest\nf = doctest.DocTestFinder().find(add, 'add', globs={'add': add})\nr = doctest.DocTestRunner(verbose=False)\nfor t in f:\n    r.run(t)\nassert r.summarize().failed == 0 and r.tries == 2", ("return a + b", "return b + a + a * 0 + b * 0 if isinstance(a, int) else b + a")),
    "a solution class like LeetCode's": (
        "from typing import List\nclass Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        seen = {}\n        for i, x in enumerate(nums):\n            if target - x in seen: return [seen[target - x], i]\n            seen[x] = i\n        return []\n",
        ["assert Solution().twoSum([2, 7, 11, 15], 9) == [0, 1]", "def check(candidate):\n    assert candidate([3, 2, 4], 6) == [1, 2]\n    assert candidate(nums=[3, 3], target=6) == [0, 1]\ncheck(Solution().twoSum)"], ("seen[target - x], i", "i, seen[target - x]")),
    "linked lists that the test builds": (
        "class ListNode:\n    def __init__(self, val=0, next=None): self.val, self.next = val, next\ndef reverse(h):\n    p = None\n    while h: h.next, p, h = p, h, h.next\n    return p\n",
        ["def build(xs):\n    h = None\n    for x in reversed(xs): h = ListNode(x, h)\n    return h\ndef values(h):\n    out = []\n    while h: out.append(h.val); h = h.next\n    return out\nassert values(reverse(build([1, 2, 3]))) == [3, 2, 1]\nassert reverse(None) is None"], ("return p\n", "return h\n")),
    "operations in a row": (
        "class LRU:\n    def __init__(self, n): self.n, self.d = n, {}\n    def get(self, k):\n        if k not in self.d: return -1\n        self.d[k] = self.d.pop(k)\n        return self.d[k]\n    def put(self, k, v):\n        self.d.pop(k, None)\n        self.d[k] = v\n        if len(self.d) > self.n: del self.d[next(iter(self.d))]\n",
        ["c, out = LRU(2), []\nfor op, args in [('put', (1, 1)), ('put', (2, 2)), ('get', (1,)), ('put', (3, 3)), ('get', (2,)), ('get', (3,))]:\n    out.append(getattr(c, op)(*args))\nassert out == [None, None, 1, None, -1, 3]"], ("self.d[k] = self.d.pop(k)", "pass")),
    "a function with a default that tests inspect": (
        "def greet(name, greeting='Hello', *args, punct='!', **kw):\n    'Greets.'\n    return f'{greeting} {name}{punct}'\n",
        ["import inspect\ns = inspect.signature(greet)\nassert list(s.parameters) == ['name', 'greeting', 'args', 'punct', 'kw'] and s.parameters['punct'].default == '!'", "assert greet.__doc__ == 'Greets.' and greet('A') == 'Hello A!' and greet('A', punct='?') == 'Hello A?'"], ("punct='!'", "punct='.'")),
    "code that tests evaluate": ("def calc(s): return eval(s, {'__builtins__': {}}, {'x': 2})\n", ["assert calc('x * 3') == 6", "assert eval('calc(\"1 + 1\")') == 2", "ns = {}\nexec('y = calc(\"x\")', {'calc': calc}, ns)\nassert ns['y'] == 2"], ("'x': 2", "'x': 3")),
    "times that are measured": ("import time\ndef wait(s):\n    t = time.perf_counter()\n    time.sleep(s)\n    return time.perf_counter() - t\n", ["import time\nstart = time.time()\nassert 0.009 < wait(0.01) < 5\nassert time.time() - start < 9"], ("time.sleep(s)", "pass")),
    "random numbers with a seed": ("import random\ndef draw(n, seed): return random.Random(seed).sample(range(100), n)\n", ["import random\nassert draw(3, 1) == random.Random(1).sample(range(100), 3)", "assert draw(2, 5) == draw(2, 5) and len(set(draw(9, 3))) == 9"], ("random.Random(seed)", "random.Random(seed + 1)")),
    "large answers": ("def big(n): return list(range(n))\ndef text(n): return 'ab' * n\n", ["assert big(50000) == list(range(50000))", "assert text(100000) == 'ab' * 100000 and len(text(3)) == 6", "assert big(3) != big(4)"], ("range(n)", "range(n + 1)")),
    "deep recursion": ("import sys\nsys.setrecursionlimit(20000)\ndef depth(n): return 0 if n == 0 else 1 + depth(n - 1)\n", ["assert depth(5000) == 5000"], ("1 + depth", "2 + depth")),
    "a program that ends with its own main": (_ADD + "if __name__ == '__main__':\n    print(add(*map(int, input().split())))\n", ["assert add(2, 2) == 4"], _MINUS),
    "the same as a script": (_ADD + "if __name__ == '__main__':\n    print(add(*map(int, input().split())))\n", [{"input": "1 2\n", "output": "3\n"}], _MINUS),
    "a script like those of APPS": (
        "import sys\ndef main():\n    data = sys.stdin.read().split()\n    n = int(data[0])\n    print(sum(map(int, data[1:n + 1])))\nmain()\n",
        [{"input": "3\n1 2 3\n", "output": "6"}, {"input": "1\n-5", "output": "-5\n"}], ("sum(", "max(")),
    "a script that reads line by line": (
        "import sys\nfor line in sys.stdin:\n    a, b = map(int, line.split())\n    sys.stdout.write(f'{a * b}\\n')\nsys.exit(0)\n", [{"input": "1 2\n3 4\n", "output": "2\n12"}], ("a * b", "a + b")),
    "a script that reads bytes": ("import sys\ndata = sys.stdin.buffer.read().split()\nprint(len(data), *data[::-1][0:1] and [data[-1].decode()])\n", [{"input": "a b c\n", "output": "3 c"}], ("data[-1]", "data[0]")),
    "a script that exits": ("n = int(input())\nif n < 0:\n    print('NO')\n    exit()\nprint('YES')\n", [{"input": "-1\n", "output": "NO"}, {"input": "1\n", "output": "YES"}], ("n < 0", "n > 0")),
    "a script with a thread for its stack": (
        "import sys, threading\nsys.setrecursionlimit(10**5)\nthreading.stack_size(2**24)\ndef f(n): return 1 if n == 0 else f(n - 1) + 1\ndef main(): print(f(int(input())))\nt = threading.Thread(target=main); t.start(); t.join()\n", [{"input": "3000\n", "output": "3001"}], ("+ 1", "+ 2")),
    "solve() that a test feeds and reads": (
        "def solve():\n    n = int(input())\n    print(n * n)\n",
        ["import io, sys\nfrom contextlib import redirect_stdout\ndef run(text):\n    sys.stdin = io.StringIO(text)\n    out = io.StringIO()\n    with redirect_stdout(out):\n        solve()\n    return out.getvalue().strip()\nassert run('5\\n') == '25'\nassert run('-2\\n') == '4'"], ("n * n", "n + n")),
}  # fmt: skip
