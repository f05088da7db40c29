"""Tasks in real containers, by Harbor and docker: what a model sees, what verifiers give, and what is left behind."""

import asyncio
import gc
import importlib.util
import json
import logging
import shutil
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

import pytest
from transformers import set_seed

from covey import GRPOConfig, GRPOTrainer
from covey.environments import HarborEnv, HarborSpec, harbor_environment
from covey.errors import ConfigError, DataError, RewardError
from environments.acting import chat_tokenizer, trained_on
from environments.harbor_tasks import WANTS, WRITE_4, make_image, task


def problem() -> str | None:
    if importlib.util.find_spec("harbor") is None:
        return "needs harbor: `make test-harbor`"
    if shutil.which("busybox") is None or shutil.which("docker") is None:
        return "needs docker, and a static busybox for its image"
    works = [
        subprocess.run(["docker", *words], capture_output=True).returncode == 0
        for words in (["ps"], ["compose", "version"])
    ]
    return None if all(works) else "needs a docker daemon and docker compose 2"


pytestmark = [
    pytest.mark.skipif(problem() is not None, reason=str(problem())),
    pytest.mark.filterwarnings("default"),  # of Harbor's own packages
    pytest.mark.slow,
]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo 4 > /answer"}}\n</tool_call><|im_end|>'


def projects() -> set[str]:
    """Projects of compose that Covey made and that have containers."""
    listed = ["docker", "ps", "--all", "--format", '{{.Label "com.docker.compose.project"}}']
    return {name for name in subprocess.run(listed, capture_output=True, text=True).stdout.split() if "covey-" in name}


@pytest.fixture(scope="module", autouse=True)
def image():
    make_image()
    yield
    gc.collect()  # what Harbor leaves open is reported here, where warnings are no errors
    assert not projects()


@pytest.fixture(scope="module")
def ended(tmp_path_factory, image):
    """What one batch of episodes, whose sandboxes started and were verified two at a time, saw and gave, by task."""
    folder = tmp_path_factory.mktemp("tasks")
    task(folder / "right")
    task(folder / "wrong", test=WANTS.format(5))
    task(folder / "crashing", test="#!/bin/sh\necho 1 > /tmp/reward; exit 3\n")
    task(
        folder / "slow",
        "[verifier]\ntimeout_sec = 1.0\n",
        test="#!/bin/sh\nsleep 60; echo 1 > /logs/verifier/reward.txt\n",
    )
    task(
        folder / "told", '[verifier.env]\nSCORE = "0.5"\n', test="#!/bin/sh\necho $SCORE > /logs/verifier/reward.txt\n"
    )
    several = '#!/bin/sh\necho \'{"tests": 0.25, "style": 1}\' > /logs/verifier/reward.json\n'
    task(folder / "several", test=several)
    task(folder / "late", "[agent]\ntimeout_sec = 1.0\n")
    task(folder / "unbuilt", image=None)
    make = HarborSpec(folder, at_once=2).environment_factory
    environments = {path.name: make() for path in sorted(folder.iterdir())}
    for name, environment in environments.items():
        assert environment.reset(task_dir=str(folder / name), prompt=[{"role": "user", "content": ""}]) == WRITE_4
    seen: dict[str, list[str]] = {name: [] for name in environments}

    def act(name: str) -> None:
        for command in (
            "ls / /tests /solution; echo 4 > /answer",
            "cat /answer; exit 3",
            "true",
            "echo '  x'; sleep 3; exit 1",
        ):
            try:
                seen[name].append(environments[name].bash(command))
            except (RuntimeError, TimeoutError) as error:
                seen[name].append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=act, args=(name,)) for name in environments]
    for turn in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            turn(thread)
    is_over = {name: environment.is_over for name, environment in environments.items()}
    given: dict[str, object] = {}
    for environment in environments.values():
        environment._judged()  # all are verified by then
    for name, environment in environments.items():
        try:
            given[name] = environment.rewards
        except RuntimeError as error:
            given[name] = error
    with pytest.raises(RewardError, match="gives tests, style and no 'reward'"):
        _ = environments["several"].reward
    for environment in environments.values():
        environment.close()
    assert not projects()
    return seen, given, is_over


def test_a_model_sees_what_its_commands_print_and_nothing_of_the_verifier(ended):
    seen, _, is_over = ended
    listed, second, third, fourth = seen["right"]
    assert listed.startswith("/:\n") or "/:\n" in listed
    assert "/tests: No such file" in listed
    assert "/solution: No such file" in listed
    assert second == "4\n\n[exit code 3]"
    assert third == "[exit code 0]"
    assert fourth == "  x\n\n[exit code 1]"
    assert not is_over["right"]


def test_a_verifiers_0_is_0_and_one_that_fails_gives_no_score(ended):
    _, given, _ = ended
    assert (given["right"], given["wrong"], given["told"]) == ({"reward": 1.0}, {"reward": 0.0}, {"reward": 0.5})
    assert given["several"] == {"tests": 0.25, "style": 1.0}
    assert "crashing was not scored by its verifier: RewardFileNotFoundError" in str(given["crashing"])
    assert "slow was not scored by its verifier: VerifierTimeoutError" in str(given["slow"])


def test_a_sandbox_that_cannot_be_built_gives_no_score_and_says_why(ended):
    seen, given, is_over = ended
    assert "unbuilt did not start" in str(given["unbuilt"])
    assert "/missing" in str(given["unbuilt"])
    assert seen["unbuilt"][0].startswith("RuntimeError: the sandbox did not start: RuntimeError: failed to solve")
    assert is_over["unbuilt"]


def test_after_the_tasks_own_time_commands_are_ended_and_what_is_there_is_verified(ended):
    seen, given, is_over = ended
    assert seen["late"][-1] == "TimeoutError: the time for this task is over"
    assert given["late"] == {"reward": 1.0}
    assert is_over["late"]


def test_a_run_learns_from_verifiers_and_leaves_no_container(tmp_path):
    for name, test in (("four", WANTS.format(4)), ("five", WANTS.format(5)), ("broken", "#!/bin/sh\nexit 1\n")):
        task(tmp_path / "tasks" / name, f'[metadata]\nkind = "{name}"\n', test=test)
    before = (
        f"<|im_start|>system\nTools: bash <|im_end|>\n<|im_start|>user\n{WRITE_4}<|im_end|>\n<|im_start|>assistant\n"
    )
    answer = "\n<|im_start|>user\n<tool_response>\n[exit code 0]\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    model = trained_on(((before, CALL), (before + CALL + answer, "ok<|im_end|>")), steps=120)
    spec = HarborSpec(tmp_path / "tasks")
    options = {"output_dir": str(tmp_path / "run"), "max_steps": 2, "num_generations": 2, "per_device_train_batch_size": 6,
               "max_completion_length": 300, "temperature": 0.05, "use_cpu": True, "metrics_by": ["kind"], "report_to": []}  # fmt: skip
    set_seed(0)
    trainer = GRPOTrainer(
        model,
        spec.reward_funcs,
        GRPOConfig(**options),
        train_dataset=spec.train_dataset,
        processing_class=chat_tokenizer(),
        environment_factory=spec.environment_factory,
    )
    trainer.train()
    logs = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(logs) == 2
    for entry in logs:
        assert entry["reward/kind=four"] == 1.0
        assert entry["reward/kind=five"] == 0.0
        assert entry["rewards/verifier/errors"] == 2  # both completions of "broken"
        assert entry["rewards/verifier/mean"] == 0.5
    assert not projects()


def test_the_next_run_removes_and_names_what_a_killed_one_left(tmp_path, caplog):
    task(tmp_path / "one")
    code = (
        "import os\nfrom covey.environments import HarborSpec\n"
        f"e = HarborSpec({str(tmp_path)!r}).environment_factory()\n"
        f"e.reset({str(tmp_path / 'one')!r}); e.bash('true'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -9
    [left] = projects()
    from covey.environments import harbor_trial

    unfinished = f"{harbor_trial._HOST}-{2**22 + 1}-1-0"  # a run that was killed before its container was made
    labels = [f"--label=com.docker.compose.{label}" for label in (f"project={unfinished}", "network=default")]
    subprocess.run(["docker", "network", "create", *labels, f"{unfinished}_default"], check=True, capture_output=True)
    harbor_trial.expect_ready.cache_clear()
    with caplog.at_level(logging.WARNING):
        harbor_environment(str(tmp_path))().close()
    assert "that a killed run had left: " in caplog.text
    assert left in caplog.text
    assert not projects()
    listed = subprocess.run(["docker", "network", "ls"], capture_output=True, text=True, check=True).stdout
    assert unfinished not in listed


@pytest.mark.parametrize("wait", [0.0, 0.8, 2.0])
def test_an_environment_that_is_closed_while_its_sandbox_starts_leaves_nothing(tmp_path, wait):
    task(tmp_path / "one")
    environment = HarborSpec(tmp_path).environment_factory()
    environment.reset(str(tmp_path / "one"))
    time.sleep(wait)
    environment.close()
    assert not projects()


def test_a_subclass_prepares_its_sandbox_and_a_command_that_prints_without_end_is_ended(tmp_path):
    class Agent(HarborEnv):
        PROMPT_SUFFIX = "Be quick."

        async def _setup(self, environment):
            await environment.exec("echo ready > /ready")

    task(tmp_path / "one")
    environment = HarborSpec(tmp_path, agent=Agent).environment_factory()
    assert environment.reset(str(tmp_path / "one")) == WRITE_4 + "Be quick."
    assert environment._exec("cat /ready") == "ready\n"
    with pytest.raises(RuntimeError, match="printed more than 2,000,000 characters"):
        environment._exec("yes")
    with pytest.raises(RuntimeError, match="timed out"):
        environment._exec("sleep 9", timeout=1)
    environment.close()


def test_a_command_whose_end_harbor_waits_for_without_end_is_answered():
    from covey.environments.harbor_trial import _run

    class Stuck:
        def scoped_output_callback(self, callback):
            self.callback = callback
            return nullcontext()

        async def exec(self, command, timeout_sec):
            try:
                await self.callback("y" * 3_000_000, "stdout")
            finally:
                await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="printed more than"):
        asyncio.run(asyncio.wait_for(_run(Stuck(), "yes", 180.0), 5))


def test_what_cannot_start_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    broken = task(tmp_path / "one") / "task.toml"
    with pytest.raises(ConfigError, match="'dokcer'"):
        HarborSpec(tmp_path, environment_type="dokcer").environment_factory()
    broken.write_text('[verifier]\ntimeout_sec = "long"\n')
    with pytest.raises(DataError, match=r"one cannot be used: .*timeout_sec"):
        HarborSpec(tmp_path).environment_factory()
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    task(tmp_path / "two")
    with pytest.raises(ConfigError, match="Docker daemon is not running"):
        HarborSpec(tmp_path).environment_factory()
