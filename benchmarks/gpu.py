"""All that is measured on a GPU, in one command of at most eight minutes that needs no network: `make gpu`, `make gpu-first`.

    python benchmarks/gpu.py                              # every part, then the table of docs/performance.md
    python benchmarks/gpu.py --first                      # two minutes: a step of 0.5B with its kernels, and rollouts
    python benchmarks/gpu.py steps lora                   # some parts; results of earlier calls stay in gpu-out
    python benchmarks/gpu.py --wheels FOLDER steps        # where only wheels can be brought (benchmarks/gpu_wheels.sh)
    python benchmarks/gpu.py --device cpu --tiny          # every script end to end at toy size; writes no page

Each part has a time limit, prints its table when it ends, and leaves its output in `gpu-out/PART.txt`: tests marked gpu in eight
processes with the demo's loss curve beside them, a step of 0.5B and of 7B with LoRA on Covey and TRL, the kernels of such a step
by name, rollouts, and the learner. TRL is left out, in a sentence, where it is not installed. Exit code 1: a part failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"
SITE = Path("/tmp/covey-gpu-site")
FIRST = ("steps", "rollout")
SLOWER_ON_A_CPU = 10
"""Factor of every time limit with `--tiny`."""
LORA = ["--lora", "16", "--prompts", "8", "--completion-tokens", "256", "--micro-batch", "8", "--steps", "2"]
SMALL = ["--device", "cpu", "--size", "tiny", "--prompts", "2", "--group", "2", "--prompt-tokens", "8"]
SMALL_STEP = [*SMALL, "--completion-tokens", "6", "--steps", "2"]


@dataclass(frozen=True)
class Call:
    """One process of a part."""

    name: str
    """Of its output in the folder, and of its result."""
    command: Sequence[str]
    seconds: int
    """Time limit."""


@dataclass
class Session:
    """What this call runs with, and all results in its folder, those of earlier calls included."""

    python: str
    out: Path
    is_tiny: bool
    deadline: float
    peer: str | None
    environment: dict[str, str]
    results: dict[str, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def run(self, calls: Sequence[Call]) -> None:
        """Run these side by side; each leaves its output and, where its last line is JSON, its result."""
        began = time.monotonic()
        slower = SLOWER_ON_A_CPU if self.is_tiny else 1
        started = [(call, self.start(call), began + slower * call.seconds) for call in calls]
        for call, process, latest in started:
            limit = max(1.0, min(latest, self.deadline) - time.monotonic())
            try:
                code: int | str = process.wait(limit)
            except subprocess.TimeoutExpired:
                process.kill()  # before the processes that it started: it would call their tests failed
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = f"cut after {time.monotonic() - began:.0f} s"
            self.keep(call, code)

    def start(self, call: Call) -> subprocess.Popen[bytes]:
        with (self.out / f"{call.name}.txt").open("wb") as file:
            return subprocess.Popen(
                call.command,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=self.environment,
                start_new_session=True,
            )

    def keep(self, call: Call, code: int | str) -> None:
        lines = (self.out / f"{call.name}.txt").read_text(errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.startswith("{")), None)
        result: dict[str, Any] = json.loads(last) if last and code == 0 else {}
        if call.name == "tests":
            result = {"tests": lines[-1].strip("= ") if lines else "", "lines": failures(lines)}
            code = 0 if code == 1 and result["tests"] else code  # failures are told, and the rest is measured
        if code != 0:
            result["failed"] = code if isinstance(code, str) else f"exit code {code}: {tail(lines)}"
            self.failed.append(call.name)
        self.results[call.name] = result
        (self.out / "results.json").write_text(json.dumps(self.results, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--first", action="store_true", help=f"only {' and '.join(FIRST)}")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to see that all of it runs")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-out")
    parser.add_argument("--peer", help="Python with TRL; by default this one, or that of .venv-trl")
    parser.add_argument("--wheels", type=Path, help=f"folder of wheels, installed into {SITE} without network")
    parser.add_argument("--seconds", type=int, help="time limit of all parts; 480, with --first 120")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        raise SystemExit(f"{unknown[0]!r} is no part; take some of {', '.join(PARTS)}.")
    if options.tiny != (options.device == "cpu"):
        raise SystemExit(
            "--device cpu and --tiny go together: a CPU is too slow for the real sizes, and a GPU measures them."
        )
    session = session_of(options)
    if options.device == "cuda":
        expect_cuda(session)
    began = time.monotonic()
    for part in options.parts or (FIRST if options.first else PARTS):
        if time.monotonic() >= session.deadline:
            print(f"{part}: left out, its time has passed; run it with: python benchmarks/gpu.py {part}")
            session.failed.append(part)
            continue
        print(f"[{time.monotonic() - began:.0f} s] {part}", flush=True)
        print(PARTS[part](session), flush=True)
    text = section(session.results, commit())
    if not options.tiny and not options.first and session.results.get("covey", {}).get("device", "cpu") != "cpu":
        PAGE.write_text(placed(PAGE.read_text(), text))
        print(f"written to {PAGE}")
    print(
        f"[{time.monotonic() - began:.0f} s] outputs are in {session.out}; failed: {', '.join(session.failed) or 'none'}"
    )
    return int(bool(session.failed))


def session_of(options: argparse.Namespace) -> Session:
    options.out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if options.wheels:
        install(options.wheels)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"))))
    beside = ROOT / ".venv-trl" / "bin" / "python"
    has_trl = importlib.util.find_spec("trl") is not None or (bool(options.wheels) and (SITE / "trl").is_dir())
    peer = options.peer or (sys.executable if has_trl else str(beside) if beside.is_file() else None)
    earlier = options.out / "results.json"
    results = json.loads(earlier.read_text()) if earlier.is_file() and options.parts else {}
    seconds = (options.seconds or (120 if options.first else 480)) * (SLOWER_ON_A_CPU if options.tiny else 1)
    deadline, peer = time.monotonic() + seconds, None if options.first else peer
    return Session(sys.executable, options.out, options.tiny, deadline, peer, environment, results)


def install(wheels: Path) -> None:
    if SITE.is_dir():
        return
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--target",
        str(SITE),
    ]
    subprocess.run([*command, *map(str, sorted(wheels.glob("*.whl")))], check=True)


def expect_cuda(session: Session) -> None:
    """Exit in a sentence where PyTorch sees no CUDA device, or too little of its memory is free."""
    ask = "import torch; print(torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else -1)"
    said = subprocess.run([session.python, "-c", ask], capture_output=True, text=True, env=session.environment).stdout
    free = int(said.split()[-1]) if said.split() else -1
    if free < 0:
        raise SystemExit("PyTorch sees no CUDA device here; --device cpu --tiny tries the scripts without one.")
    if free < 40 * 2**30:
        print(f"{free / 2**30:.0f} GiB of the card are free: parts that need more will fail, each in its own sentence.")


# -- parts -------------------------------------------------------------------------------------------------------------


def tests_and_demo(session: Session) -> str:
    """Tests marked gpu, and the demo, whose loss curve needs no quiet device."""
    marked = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    command = [
        session.python,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-n",
        "8",
        "--timeout",
        "90",
        "-vv",
        "-p",
        "no:cacheprovider",
    ]
    demo = [session.python, "-m", "covey", "demo", "--json", "--output-dir", str(session.out / "demo")]
    if session.is_tiny:
        command = [session.python, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider"]
        marked, demo = (
            [str(ROOT / "tests" / "rollout" / "test_sampling.py")],
            [*demo, "--steps", "2", "--held-out", "10"],
        )
    session.run([Call("tests", [*command, *marked], 130), Call("demo", demo, 130)])
    curve = curve_of(session.out / "demo")
    (session.out / "demo_curve.txt").write_text(curve)
    tests = session.results["tests"]
    return "\n".join([tests.get("failed") or tests["tests"], *tests.get("lines", []), curve])


def steps(session: Session) -> str:
    """A step of 0.5B, with the kernels of one step more in a file, then TRL's."""
    profile = session.out / "profile_0.5b.txt"
    profile.unlink(missing_ok=True)
    more = SMALL_STEP if session.is_tiny else []
    script = str(HERE / "gpu_step.py")
    mine = Call("covey", [session.python, script, "covey", *more, "--profile", str(profile)], 120)
    return beside(session, mine, "trl", [script, "trl", *(more or ["--steps", "2"])], 90)


def lora(session: Session) -> str:
    """A step of 7B with LoRA on bfloat16 weights, then TRL's."""
    profile = session.out / "profile_7b_lora.txt"
    profile.unlink(missing_ok=True)
    more = [*SMALL_STEP, "--lora", "4"] if session.is_tiny else ["--size", "7b", *LORA]
    script = str(HERE / "gpu_step.py")
    mine = Call("lora_covey", [session.python, script, "covey", *more, "--profile", str(profile)], 100)
    return beside(session, mine, "lora_trl", [script, "trl", *more], 70)


def beside(session: Session, mine: Call, name: str, command: list[str], seconds: int) -> str:
    session.run([mine])
    print(row(mine.name, session.results[mine.name]), flush=True)
    if session.peer is None:
        session.results.pop(name, None)
        return "TRL is left out: by --first, or since it is installed neither for this Python nor in .venv-trl."
    session.run([Call(name, [session.peer, *command], seconds)])
    return row(name, session.results[name])


def rollout(session: Session) -> str:
    """Rollouts by rows beside their roofline and the plan; 7B at 64 rows."""
    more = ["--prompts", "8", "16", "32", "64", "--prompt-tokens", "256", "--max-tokens", "256", "--repeats", "1"]
    large = ["--size", "7b", "--prompts", "8", "--prompt-tokens", "256", "--max-tokens", "128", "--repeats", "1"]
    if session.is_tiny:
        more = large = [
            "--device",
            "cpu",
            "--size",
            "tiny",
            "--prompts",
            "1",
            "2",
            "--max-tokens",
            "6",
            "--repeats",
            "1",
        ]
    command = [session.python, str(HERE / "rollout_cuda.py"), "--only", "graphs"]
    session.run([Call("rollout", [*command, *more], 45)])
    print(text_of(session, "rollout"), flush=True)
    session.run([Call("rollout_7b", [*command, *large], 40)])
    return text_of(session, "rollout_7b")


def learner(session: Session) -> str:
    """The learner's table."""
    more = ["--prompts", "16", "--repeats", "1", "--checkpointing"]
    if session.is_tiny:
        more = ["--device", "cpu", "--size", "tiny", "--prompts", "2", "--group", "2", "--completion-tokens", "8"]
        more += ["--prompt-tokens", "8", "--repeats", "1"]
    session.run([Call("learner", [session.python, str(HERE / "learner_cuda.py"), *more], 60)])
    return text_of(session, "learner")


PARTS: dict[str, Callable[[Session], str]] = {
    "steps": steps,
    "rollout": rollout,
    "tests": tests_and_demo,
    "lora": lora,
    "learner": learner,
}
"""By what tells most."""


# -- what is shown -----------------------------------------------------------------------------------------------------


def failures(lines: Sequence[str]) -> list[str]:
    """Failed tests, each once: pytest names them as they end, which a run that is cut has done too, and at the end with the error."""
    named = [match[1] for match in map(re.compile(r"(?:^|\] )((?:FAILED|ERROR) .*)").search, lines) if match]
    return list({line.split(" - ")[0].strip(): line.strip()[:180] for line in named}.values())


def tail(lines: Sequence[str]) -> str:
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "it said nothing")


def text_of(session: Session, name: str) -> str:
    """The output of a part without its JSON."""
    if "failed" in session.results[name]:
        return f"{name}: {session.results[name]['failed']}"
    lines = (session.out / f"{name}.txt").read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if "|" in line or "/s" in line or line.strip()[:1].isdigit())


def row(name: str, found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"{name}: {found['failed']}"
    parts = "".join(f", {part} {seconds[-1]:.2f} s" for part, seconds in found["parts"].items() if seconds)
    launches = "".join(f", {one['launches']} kernels in {part}" for part, one in found["profile"].items())
    memory = f", reserved {found['reserved_gib']} GiB" if found["reserved_gib"] else ""
    return f"{name}: {found['step']:.2f} s a step{parts}, first {found['first']:.1f} s{memory}{launches}"


def curve_of(folder: Path) -> str:
    """Loss and reward of the demo by step, one line each."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        return "demo: no metrics"
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    pairs = [(entry.get("step"), entry.get("loss"), entry.get("reward")) for entry in entries if "loss" in entry]
    return "\n".join(["step loss reward", *(" ".join(map(str, pair)) for pair in pairs)])


WORKLOADS = {
    "0.5B, full, 32 x 8 completions of 512 tokens": ("covey", "trl"),
    "7B LoRA r=16 on bfloat16 weights, 8 x 8 of 256": ("lora_covey", "lora_trl"),
}


def section(results: dict[str, Any], commit: str) -> str:
    """The GPU's tables in Markdown: steps, rollouts, the learner, tests."""
    facts = next((found for found in results.values() if "device" in found), {"device": "?", "torch": "?"})
    today = time.strftime("%Y-%m-%d")
    lines = [
        f"Measured on one {facts['device']}, torch {facts['torch']}, {today}, at {commit}, by `make gpu`. GiB are what PyTorch had reserved at most.",
        "",
    ]
    lines += ["| step | TRL, s | Covey, s | ratio | of it rollout, learner | first step, s | TRL, GiB | Covey, GiB |"]
    lines += ["|---|--:|--:|--:|--:|--:|--:|--:|"]
    lines += [workload(name, *(results.get(side, {}) for side in sides)) for name, sides in WORKLOADS.items()]
    for name in ("rollout", "rollout_7b"):
        lines += rollouts(results.get(name, {}))
    lines += learners(results.get("learner", {}))
    if results.get("tests", {}).get("tests"):
        lines += ["", f"Tests marked `gpu`: {results['tests']['tests']}"]
    return "\n".join(lines)


def workload(name: str, mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    if "step" not in mine:
        return f"| {name} | | {mine.get('failed', 'not run')} | | | | | |"
    seconds = f"{theirs['step']:.2f}" if "step" in theirs else theirs.get("failed", "not run")
    ratio = f"{theirs['step'] / mine['step']:.1f}x" if "step" in theirs else ""
    parts = ", ".join(f"{seconds[-1]:.2f}" for seconds in mine["parts"].values() if seconds)
    first = f"{mine['first']:.1f}"
    return (
        f"| {name} | {seconds} | {mine['step']:.2f} | {ratio} | {parts} | {first} | {theirs.get('reserved_gib') or ''} | "
        f"{mine['reserved_gib'] or ''} |"
    )


def rollouts(found: dict[str, Any]) -> list[str]:
    if "tables" not in found:
        return []
    lines = [
        "",
        f"| rollout, {found['size']}, rows | s | tokens/s | of the roofline | planned, s |",
        "|--:|--:|--:|--:|--:|",
    ]
    for rows, table in found["tables"].items():
        one = table["sides"]["graphs"]
        if "failed" in one:
            lines.append(f"| {rows} | {one['failed']} | | | |")
            continue
        plan = table["plan_seconds"] or ""
        lines.append(
            f"| {rows} | {one['seconds']:.2f} | {one['tokens_per_second']:.0f} | {one['roofline']:.0%} | {plan} |"
        )
    return lines


def learners(found: dict[str, Any]) -> list[str]:
    if not found.get("sides"):
        return []
    lines = ["", "| learner | s a step | MFU | peak above weights and optimizer, MiB |", "|---|--:|--:|--:|"]
    for name, one in found["sides"].items():
        lines.append(f"| {name} | {one['step']:.2f} | {one['mfu']:.0%} | {one['peak_above_mib']:.0f} |")
    return lines


def placed(page: str, text: str) -> str:
    """The page with `text` between its two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() or "an unknown commit"


if __name__ == "__main__":
    sys.exit(main())
