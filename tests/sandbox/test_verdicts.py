"""A verdict is earned: what a program says of itself, does to its process or overrides decides nothing."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

import pytest

from covey.errors import RewardError
from covey.sandbox import Sandbox, mutants

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can isolate")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(1) as sandbox:
        yield sandbox


TESTS = ["assert double(21) == 42", "assert double(1.5) == 3.0", "assert double('ab') == 'abab'"]


def test_the_right_program_passes(sandbox: Sandbox) -> None:
    result = sandbox.run("def double(x):\n    print('doubling', x)\n    return 2 * x", TESTS)
    assert result.passed
    assert result.reason == "passed"
    assert result.tests == (True, True, True)
    assert result.stdout == "doubling 21\ndoubling 1.5\ndoubling ab\n"
    assert result.seconds > 0


def test_a_wrong_program_fails_and_says_where(sandbox: Sandbox) -> None:
    result = sandbox.run("def double(x): return x + 21", TESTS)
    assert not result.passed
    assert result.reason == "wrong" or result.tests == (True, False, False)
    assert result.tests[0]
    assert result.detail == "test 2 of 3 failed: AssertionError: double(1.5) == 3.0"


FORGERIES = {
    "os._exit(0)": "import os\nos._exit(0)",
    "os._exit(0) when called": "import os\ndef double(x): os._exit(0)",
    "sys.exit(0)": "import sys\nsys.exit(0)",
    "SystemExit when called": "def double(x): raise SystemExit(0)",
    "StopIteration": "def double(x): raise StopIteration",
    "KeyboardInterrupt": "def double(x): raise KeyboardInterrupt",
    "no function": "pass",
    "nothing": "",
    "an exit handler": "import atexit, os\natexit.register(os._exit, 0)\ndef double(x): return None",
    "a printed verdict": "print('{\"test\": 0, \"outcome\": \"passed\"}')\nprint('{\"done\": true}')\ndef double(x): return None",
    "a verdict on every descriptor": (
        "import os\nlines = b''.join(b'{\"test\": %d, \"outcome\": \"passed\"}\\n' % n for n in range(3)) + b'{\"done\": true}\\n'\n"
        "for fd in range(3, 256):\n    try: os.write(fd, lines)\n    except OSError: pass\ndef double(x): return None"
    ),
    "an answer before the question": (
        "import json, os, struct\n"
        "def say(message):\n    body = json.dumps(message).encode()\n    os.write(3, struct.pack('!Q', len(body)) + body)\n"
        "say({'loaded': True})\nfor _ in range(20): say({'value': True})"
    ),
    "a message that is too long": "import os, struct\nos.write(3, struct.pack('!Q', 2**60))",
    "an empty message": "import os, struct\nos.write(3, struct.pack('!Q', 0))",
    "no message": "import os, struct\nos.write(3, struct.pack('!Q', 4) + b'true')",
    "an object that equals everything": (
        "class Any:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    __hash__ = None\n"
        "def double(x): return Any()"
    ),
    "text that equals everything": (
        "class Any(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\ndef double(x): return Any('x')"
    ),
    "a number that equals everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef double(x): return Any(1)"
    ),
    "a tuple type that equals everything": (
        "from collections import namedtuple\nclass Any(namedtuple('Any', 'a')):\n    def __eq__(self, other): return True\n"
        "def double(x): return Any(1)"
    ),
    "assertions that never fail": "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\ndef double(x): return None",
    "its own assertion": "def double(x): raise AssertionError",
    "patched comparison": "import operator\noperator.eq = lambda a, b: True\ndef double(x): return None",
    "expected values in memory": (
        "import gc\ndef double(x):\n    wanted = ' '.join(['assert', 'double'])\n"
        "    return 2 * x if any(wanted in repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple, set))) else None"
    ),
    "expected values in frames": (
        "import sys\ndef double(x):\n    wanted, frame = ' '.join(['assert', 'double']), sys._getframe().f_back\n    while frame:\n"
        "        if wanted in repr(frame.f_locals): return 2 * x\n        frame = frame.f_back"
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", FORGERIES)
def test_a_pass_cannot_be_forged_by(how: str, sandbox: Sandbox) -> None:
    result = sandbox.run(FORGERIES[how], TESTS, timeout=5)
    assert not result.passed, result
    assert not any(result.tests), result


def test_comparisons_are_not_handed_to_an_object_of_the_programs(sandbox: Sandbox) -> None:
    """Each of its operators would see the expected value, and answer as it likes."""
    code = (
        "class Any:\n    def __sub__(self, other): return 0\n    __rsub__ = __sub__\n    def __lt__(self, other): return True\n"
        "    __le__ = __gt__ = __ge__ = __lt__\n    def __contains__(self, other): return True\n    def __abs__(self): return 0\n"
        "    def __round__(self, n=0): return other\n    def __iter__(self): return iter(())\n"
        "def half(x): return Any()"
    )
    tests = [
        "assert abs(half(3) - 1.5) < 1e-6", "assert 1.5 - half(3) == 0", "assert 1.4 < half(3) < 1.6", "assert half(3) >= 1.5",
        "assert 1.5 in half(3)", "assert round(half(3), 2) == 1.5", "import math\nassert math.isclose(half(3), 1.5)",
        "assert [half(3)] == [1.5]", "assert {half(3)} == {1.5}", "assert half(3) in (1.5, 2)", "assert sorted([half(3), 1.5]) == [1.5, 1.5]",
    ]  # fmt: skip
    assert sandbox.run(code, tests).tests == (False,) * len(tests)


def test_names_that_tests_lean_on_are_not_the_programs(sandbox: Sandbox) -> None:
    code = (
        "seen = []\n"
        "def isclose(a, b, **k): return True\ndef len(x): return 3\ndef set(x): return frozenset()\ndef sorted(x): return 0\n"
        "def Counter(x): return 0\nclass math:\n    isclose = staticmethod(lambda a, b: True)\ndef f(x): return None"
    )
    tests = ["assert isclose(f(1), 2.0)", "assert math.isclose(f(1), 2.0)", "assert len(f(1)) == 3", "assert set(f(1)) == set([1])",
             "assert sorted(f(1)) == sorted([2])", "assert Counter(f(1)) == Counter([1])"]  # fmt: skip
    assert not any(sandbox.run(code, tests).tests)


def test_a_builtin_that_every_test_is_about_may_be_redefined(sandbox: Sandbox) -> None:
    assert sandbox.run("def sum(a, b): return a + b", ["assert sum(10, 15) == 25", "assert sum(1, 2) == 3"]).passed


def test_an_earlier_programs_tests_are_not_in_a_later_ones_memory(sandbox: Sandbox) -> None:
    secret = "remember-me-4711"
    sandbox.run("def f(x): return 0", [f"assert f(1) == {secret!r}"])
    code = (  # the reverse of what it looks for, so that it does not find itself
        "import ctypes, gc\ndef f(reverse):\n    for o in gc.get_objects():\n"
        "        start = id(o) & ~4095\n        if reverse in ctypes.string_at(start, 4096)[::-1]: return True\n    return False"
    )
    result = sandbox.run(code, [f"assert f({secret[::-1].encode()!r}) == False"], strict=True)
    assert result.passed, result


def test_values_come_back_as_what_they_are(sandbox: Sandbox) -> None:
    values = [
        "None", "True", "3", "-2.5", "10**40", "float('inf')", "'ünï\\ud800'", "b'\\x00\\xff'", "(1, (2,))", "[1, [2]]", "{1, 2}",
        "frozenset({3})", "{'a': [1], 2: None, (1, 2): 'x'}", "1 + 2j", "range(3)", "bytearray(b'x')", "int",
    ]  # fmt: skip
    tests = [f"value = same({value})\nassert value == {value} and type(value) is type({value})" for value in values]
    result = sandbox.run("def same(x): return x", tests)
    assert result.passed, result


def test_library_values_come_back_by_value(sandbox: Sandbox) -> None:
    code = (
        "from collections import Counter, OrderedDict, defaultdict, deque, namedtuple\nfrom decimal import Decimal\n"
        "from fractions import Fraction\nimport datetime, enum\nP = namedtuple('P', 'x y')\nclass Color(enum.IntEnum):\n    RED = 1\n"
        "def a(): return Counter('aab')\ndef b(): return deque([1, 2])\ndef c(): return defaultdict(list, {1: [2]})\n"
        "def d(): return Decimal('1.10')\ndef e(): return Fraction(1, 3)\ndef f(): return datetime.date(2020, 1, 2)\n"
        "def g(): return P(1, 2)\ndef h(): return Color.RED\ndef i(): return datetime.timedelta(days=1)\n"
        "def j(): return OrderedDict(a=1)"
    )
    tests = [
        "assert a() == {'a': 2, 'b': 1} == Counter('aab')", "assert list(b()) == [1, 2]", "assert c() == {1: [2]}",
        "assert d() == Decimal('1.1')", "assert e() == Fraction(1, 3)", "import datetime\nassert f() == datetime.date(2020, 1, 2)",
        "assert g() == (1, 2)", "assert h() == 1", "assert i() == datetime.timedelta(1)", "assert j() == {'a': 1}",
    ]  # fmt: skip
    result = sandbox.run(code, tests)
    assert result.passed, result


def test_objects_generators_callbacks_and_arguments_changed_in_place_work_across_the_border(sandbox: Sandbox) -> None:
    code = (
        "class Node:\n    def __init__(self, data): self.data, self.left, self.right = data, None, None\n"
        "    def __len__(self): return 1 + (len(self.left) if self.left else 0) + (len(self.right) if self.right else 0)\n"
        "    def __eq__(self, other): return isinstance(other, Node) and self.data == other.data\n"
        "def count(): \n    yield 1\n    yield 2\n"
        "def tidy(items, seen): items.sort(); seen.add(items[0])\n"
        "def apply(f, x): return f(f(x))\n"
        "def fail(): raise KeyError('gone')\n"
        "LIMIT = 7\n"
    )
    setup = "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(3)"
    tests = [
        "assert root.left.data == 2 and len(root) == 3 and root.right is None",
        "assert Node(4) == Node(4) and not Node(4) == Node(5)",
        "assert isinstance(root, Node) and not isinstance(3, Node)",
        "assert list(count()) == [1, 2] and next(count()) == 1",
        "items, seen = [3, 1, 2], set()\ntidy(items, seen)\nassert items == [1, 2, 3] and seen == {1}",
        "assert apply(lambda x: x * 10, 7) == 700",
        "try:\n    fail()\n    raise AssertionError\nexcept KeyError as error:\n    assert 'gone' in str(error)",
        "def check(candidate):\n    assert candidate(LIMIT) == 7\ncheck(lambda x: x)",
    ]
    result = sandbox.run(code, tests, setup=setup)
    assert result.passed, result


@pytest.mark.parametrize(
    "code, tests, reason",
    [
        ("def f(:", ["assert f() == 1"], "syntax"),
        ("1 / 0", ["assert f() == 1"], "error"),
        ("def f(): 1 / 0", ["assert f() == 1"], "error"),
        ("def f(): return bytearray(10**10)", ["assert f() == 1"], "memory"),
        ("def f():\n    while True: pass", ["assert f() == 1"], "timeout"),
        ("def f(): return 1", ["assert f( == 1"], "tests"),
        ("def f(): import os; os.abort()", ["assert f() == 1"], "crashed"),
    ],
)
def test_the_reason_is_named(code: str, tests: list[str], reason: str, sandbox: Sandbox) -> None:
    result = sandbox.run(code, tests, timeout=0.3 if reason == "timeout" else 20)
    assert (result.passed, result.reason) == (False, reason), result
    assert result.detail


WAITS = "import time\ntime.sleep(0.5)\n"
"""Longer by the clock than its limit of processor time, as on a machine that is busy."""
BURNS = "import time\nwhile time.process_time() < 0.5: pass\n"


BESIDE = ["import gc\nassert f() == 1 and not isinstance(f, int)"]


@pytest.mark.parametrize("tests", [["assert f() == 1"], pytest.param(BESIDE, marks=pytest.mark.slow), None, "print"])
def test_the_limit_is_processor_time(tests: list[str] | str | None, sandbox: Sandbox) -> None:
    tests = [{"input": "", "output": "1"}] if tests == "print" else tests
    ends = "def f(): return 1\nprint(f())"
    result = sandbox.run(WAITS + ends, tests, timeout=0.3)
    assert result.passed, result
    late = sandbox.run(BURNS + ends, tests, timeout=0.3)
    assert late.reason == "timeout"
    assert not any(late.tests), "`code(partial=True)` would pay it"


def test_the_limit_is_that_of_all_pairs_together(sandbox: Sandbox) -> None:
    code = BURNS.replace("0.5", "0.4") + "print(1)"
    result = sandbox.run(code, [{"input": "", "output": "1"}] * 3, timeout=0.7)
    assert (result.reason, result.tests[2]) == ("timeout", False)
    assert result.tests[0]


def test_programs_that_read_and_print_are_compared_line_by_line(sandbox: Sandbox) -> None:
    code = "a, b = map(int, input().split())\nprint(a + b, end='  \\n\\n')"
    pairs = [{"input": "1 2\n", "output": "3"}, {"input": "5 5", "output": "10\n"}, {"input": "1 1", "output": "3"}]
    result = sandbox.run(code, pairs)
    assert result.tests == (True, True, False)
    assert result.reason == "wrong"
    assert not sandbox.run("import os; print(3); os._exit(0)", [{"input": "", "output": "4"}]).passed
    assert sandbox.run("if __name__ == '__main__':\n    print('ran')", [{"input": "", "output": "ran"}]).passed


@pytest.mark.parametrize(
    "printed, expected, right",
    [
        ("0.3333333333333333", "0.333333", True), ("0.0 0.14285714285714285", "0.0 0.142857143", True), ("0.3334", "0.333333", False),
        ("3.0", "3", True), ("1.9999999999", "2", True), ("100000.5", "100000", False), ("50000000000000001", "50000000000000000", False),
        ("nan", "3.5", False), ("inf", "1e308", False), ("Case #1: 0.33333333", "Case #1: 0.333333", True), ("[0.3333333, 2]", "[0.333333, 2]", True),
        ("case #1: 0.33333333", "Case #1: 0.333333", False), ("*\\n**", " *\\n**", False), ("1  2", "1 2", True), ("a  b", "a b", False), ("1e5", "100000", True),
    ],
)  # fmt: skip
def test_printed_numbers_are_compared_as_the_harness_of_apps_compares_them(
    printed: str, expected: str, right: bool, sandbox: Sandbox
) -> None:
    pair = {"input": "", "output": expected.replace("\\n", "\n")}
    code = f"print({printed!r}.replace('\\\\n', chr(10)))"
    assert sandbox.run(code, [pair]).passed == right
    if "." in expected:
        assert not sandbox.run(code, [{**pair, "exact": True}]).passed


def test_sixteen_mebibytes_may_be_printed(sandbox: Sandbox) -> None:
    size = 15 * 2**20
    assert sandbox.run(f"print('x' * {size})", [{"input": "", "output": "x" * size}]).passed
    assert sandbox.run("while True: print('x' * 2**20)", [{"input": "", "output": "x"}]).reason == "output"


def test_a_script_may_use_sixteen_threads(sandbox: Sandbox) -> None:
    code = "from concurrent.futures import ThreadPoolExecutor\nimport time\nwith ThreadPoolExecutor(16) as pool:\n    print(sum(pool.map(lambda x: (time.sleep(0.005), x)[1], range(100))))"
    result = sandbox.run(code, [{"input": "", "output": "4950"}])
    assert result.passed, result


def test_what_a_program_draws_at_random_is_the_same_each_time(sandbox: Sandbox) -> None:
    code = "import random\nprint(random.random(), hash('text'))"
    assert sandbox.run(code).stdout == sandbox.run(code).stdout


@pytest.mark.parametrize(
    "keywords, sentence",
    [
        ({"tests": []}, "tests is empty"),
        ({"tests": [3]}, "tests must be statements"),
        ({"tests": ["assert True", {"input": "", "output": ""}]}, "all of one kind"),
        ({"setup": "x = 1"}, "setup is code for the tests"),
        ({"timeout": 0}, "timeout must be a number of seconds above 0, not 0"),
        ({"timeout": float("inf")}, "timeout"),
        ({"memory_mb": 0}, "memory_mb"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(keywords: dict, sentence: str, sandbox: Sandbox) -> None:
    with pytest.raises(RewardError, match=sentence):
        sandbox.run("pass", **keywords)


def test_a_layer_of_no_known_name_is_refused() -> None:
    with pytest.raises(RewardError, match="no layer 'chroot'"):
        Sandbox(layers=("chroot",))


@pytest.mark.parametrize("layers, open_to_it", [((), "files, network, processes"), (("landlock",), "network, processes"), (("seccomp",), "files")])  # fmt: skip
def test_nothing_runs_where_it_could_get_out(layers: tuple[str, ...], open_to_it: str) -> None:
    with Sandbox(1, layers=layers) as sandbox, pytest.raises(RewardError, match=f"cannot be run safely.*{open_to_it}"):
        sandbox.run("print('ran')")


def test_what_cannot_isolate_runs_only_when_told_to_and_still_within_limits() -> None:
    with Sandbox(1, layers=(), allow_unisolated=True) as sandbox:
        assert not sandbox.isolation.safe
        assert "not safe: nothing keeps a program from the files" in str(sandbox.isolation)
        assert sandbox.run("def f(x): return x", ["assert f(1) == 1"]).passed
        assert sandbox.run("while True: pass", timeout=0.5).reason == "timeout"
        assert sandbox.run("bytearray(10**10)").reason == "memory"


@pytest.mark.parametrize(
    "test, holds",
    [
        ("assert f(1) == 4711", {0: False}),
        ("assert 4711 == f(1)", {0: False}),
        ("assert f(1) in (4711, 4712)", {0: False}),
        ("assert yes == 4711", {0: True}),
        ("import unittest\nunittest.TestCase().assertEqual(yes, 4711)", {0: True}),
    ],
)
def test_a_comparison_of_a_mutant_is_recorded_and_taken_for_true(test: str, holds: dict[int, bool]) -> None:
    """The run of a mutant goes on behind it, and says whether it held with another value than the expected one."""

    class Yes:
        def __eq__(self, other: object) -> bool:
            return True

    mutation = mutants.Mutation(frozenset({0}))
    tree = ast.fix_missing_locations(mutation.rewrite(ast.parse(test + "\nreached.append(1)"), 0))
    record = mutants.Record(mutation.constants, frozenset(), frozenset())
    reached: list[int] = []
    names = {mutants.NOTE: record.note, mutants.PRETEND: record.pretend, mutants.SEEN: lambda value: value}
    exec(compile(tree, "<tests>", "exec"), {**names, "f": lambda x: 4711, "yes": Yes(), "reached": reached})
    assert reached == [1]
    assert record.taken()["held"] == [number for number, holds_true in holds.items() if holds_true]
