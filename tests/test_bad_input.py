"""Bad input before a run is one line and nothing is started; what breaks while it runs is counted and survived, or ends
it in one line."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

DUPLICATE = """\
from turnwise import Implementation, hookimpl

class Game:
    pass

@hookimpl
def environments():
    return [Implementation("fake_env", Game)]
"""

FAILING = """\
import time
from turnwise import Implementation, hookimpl
from turnwise.testing.fakes import FakeBackend, FakeBackendConfig, FakeStrategy

class Backend(FakeBackend):
    async def generate(self, request):
        if self._version >= 3 and request.order[0] == 0:
            raise OSError("the engine's process is gone")
        return await super().generate(request)

class Strategy(FakeStrategy):
    def update(self, update):
        if self._updates >= 6:
            raise KeyError("a mistake in a plugin,\\non two lines")
        return super().update(update)

class Hanging(FakeStrategy):
    def update(self, update):
        if self._updates >= 6:
            time.sleep(8)
        return super().update(update)

class Logger:
    def __init__(self, config, context):
        self.calls = 0
    def scalars(self, step, metrics):
        raise ConnectionError("the tracking server is away")
    def trajectories(self, step, split, trajectories):
        pass
    def artifact(self, step, name, path):
        pass
    def resume(self, step):
        pass
    def close(self):
        raise RuntimeError("a logger that was switched off is left alone")

@hookimpl
def inference_backends():
    return [Implementation("failing_backend", Backend, config="turnwise.testing.fakes:FakeBackendConfig")]

@hookimpl
def train_strategies():
    return [Implementation("failing_strategy", Strategy), Implementation("hanging_strategy", Hanging)]

@hookimpl
def loggers():
    return [Implementation("failing_logger", Logger)]
"""

WITH_FILE = "plugins=[turnwise.testing.plugin, ./mine.py]"


def errors(run: Any, result: Result, code: int) -> list[str]:
    """The lines of a run that was refused: nothing but errors, and nothing was made."""
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    lines = [line for line in result.output.splitlines() if not line.startswith("note: ")]
    assert all(line.startswith("error: ") for line in lines), result.output
    assert sorted(p.name for p in run.folder.iterdir() if p.name not in ("mine.py", "model")) == ["run.yaml"]
    return lines


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learning_rat=1", ["$.learning_rat", "unknown key"]),
        ("max_stepps=3", ["$.max_stepps", "Did you mean 'max_steps'?"]),
        ("max_steps=many", ["$.max_steps", "'many' is text, a whole number is needed"]),
        (
            "actor_train.training_args.learning_rate=[1]",
            ["$.actor_train.training_args.learning_rate", "a number is needed"],
        ),
        (
            "adv_estimator=fake_estimater",
            ["Did you mean 'fake_estimator'?", "Installed: agentic_reinforce, fake_estimator, gae"],
        ),
        ("custom_envs.Count.env_type=frozen_lak", ["$.custom_envs.Count.env_type", "Did you mean 'frozen_lake'?"]),
        ("custom_envs.Count.env_config={lenght: 3}", ["no option 'lenght'. Did you mean 'length'?"]),
        (
            "plugins=[turnwise.testing.plugin, turnwise-nowhere, turnwise-noplace>=2]",
            ["Fix: pip install --find-links dist 'turnwise-nowhere' 'turnwise-noplace>=2'"],
        ),
        ("plugins=[turnwise.testing.plugin, ./my_env.py]", ["the file './my_env.py' does not exist"]),
        ("rollout_batch_size=9", ["9 is not num_env_groups 2 × group_size 4 = 8", "Fix: rollout_batch_size: 8"]),
        ("resume_from_checkpoint=nowhere", ["nowhere is not a checkpoint", "Fix: "]),
        ("pretrain=nowhere/model", ["'nowhere/model' is not a folder"]),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(fake: Any, override: str, words: list[str]) -> None:
    (line,) = errors(fake, fake.command("train", "run.yaml", override), 2)
    assert [word for word in words if word not in line] == [], line


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "import package_that_is_not_there\n",
            ["'./mine.py' is broken: ModuleNotFoundError: No module named 'package_that_is_not_there'"],
        ),
        (
            "from turnwise import hookimpl\n\n@hookimpl\ndef enviroments():\n    return []\n",
            ["unknown hook 'enviroments'. Did you mean 'environments'?"],
        ),
        ("def f(:\n", ["'./mine.py' is broken: SyntaxError"]),
        (DUPLICATE, ["environment 'fake_env' is provided twice: by ./mine.py and turnwise.testing.plugin", "Fix: "]),
    ],
)
def test_a_broken_plugin_is_one_line_before_anything_starts(fake: Any, source: str, words: list[str]) -> None:
    (fake.folder / "mine.py").write_text(source)
    (line,) = errors(fake, fake.command("train", "run.yaml", WITH_FILE), 2)
    assert [word for word in words if word not in line] == [], line


@pytest.mark.parametrize(
    ("pretrain", "files", "words"),
    [
        ("/nowhere/model", {}, "the folder /nowhere/model is not there"),
        ("./model", {"notes.txt": ""}, "model is not a model folder (it has no config.json)"),
        ("./model", {"config.json": "{"}, "config.json is not a model's configuration"),
        (
            "./model",
            {"config.json": '{"model_type": "qwen2"}', "tokenizer.json": '{"model": {}}', "chat_template.jinja": "x"},
            "model has no weights as safetensors",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_one_line_before_anything_starts(
    lake: Any, pretrain: str, files: dict[str, str], words: str
) -> None:
    for name, text in files.items():
        (lake.folder / "model").mkdir(exist_ok=True)
        (lake.folder / "model" / name).write_text(text)
    (line,) = errors(lake, lake.command("train", "run.yaml", f"pretrain={pretrain}"), 2)
    assert words in line


@pytest.mark.parametrize("folder", ["run.yaml/out", "/proc/turnwise/out"])
@pytest.mark.parametrize("key", ["output_dir", "logging_dir", "render_save_dir", "rollout_dump_dir"])
def test_a_folder_that_cannot_be_written_is_the_machines_fault(fake: Any, key: str, folder: str) -> None:
    (line,) = errors(fake, fake.command("train", "run.yaml", f"{key}={folder}"), 3)
    assert line.startswith(f"error: {key}: ")
    assert f"Fix: choose another {key}" in line


def test_every_mistake_is_reported_at_once(fake: Any) -> None:
    overrides = [
        "max_steps=many",
        "adv_estimator=grpoo",
        "plugins=[turnwise.testing.plugin, turnwise-nowhere]",
        "gama=1",
        "actor_infer.top_p=1",
    ]
    lines = errors(fake, fake.command("train", "run.yaml", *overrides), 2)
    assert len(lines) == 5
    for word in ("turnwise-nowhere", "'grpoo'", "$.max_steps", "$.gama", "$.actor_infer.top_p"):
        assert sum(word in line for line in lines) == 1, word


@pytest.mark.parametrize("file", ["manifest.json", "actor_train/state.npz"])
def test_a_checkpoint_that_was_cut_short_is_one_line(fake: Any, file: str) -> None:
    fake.train("max_steps=4")
    metrics = (fake.folder / "out/metrics.jsonl").read_bytes()
    cut = fake.folder / "out/checkpoints/checkpoint-000004" / file
    os.truncate(cut, cut.stat().st_size // 2)
    result = fake.command("train", "run.yaml", "resume_from_checkpoint=true")
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert "cut short" in line
    assert "checkpoint-000004" in line
    assert (fake.folder / "out/metrics.jsonl").read_bytes() == metrics
    fake.train("resume_from_checkpoint=out/checkpoints/checkpoint-000002")  # the one before is as good as ever


def test_a_checkpoint_past_the_last_step_is_one_line(fake: Any) -> None:
    fake.train()
    result = fake.command("train", "run.yaml", "max_steps=4", "eval_steps=2", "resume_from_checkpoint=true")
    assert result.exit_code == 1
    assert result.output.splitlines()[0].startswith(
        "error: out/checkpoints/checkpoint-000006 is after step 6, max_steps is 4. Fix: "
    )
    assert len(fake.metrics()) == 7


# ---------------------------------------------------------------- while it runs


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("what", ["raise", "hang", "nan", "nontext"])
def test_episodes_that_fail_are_counted_and_replaced(fake: Any, what: str, at: int) -> None:
    """Every second seed fails. In training its group is replaced; the evaluation counts what it lacks."""
    overrides = [
        f"custom_envs.Count.env_config={{fails: {what}, fails_at: {at}, fails_every: 2, hang: 1.5}}",
        "custom_envs.Count.step=thread",
        "max_steps=3",
        *("seed=4", "val_seed=4"),  # of whose environment seeds some are even, and not all
        *(f"{split}_env_manager.max_env_failure_rate=0.9" for split in ("train", "val")),
        *(f"{split}_env_manager.{call}_timeout=0.25" for split in ("train", "val") for call in ("step", "reset")),
        *(f"{split}_env_manager.max_env_retries=0" for split in ("train", "val")),
    ]
    result = fake.train(*overrides)
    lines = fake.metrics()
    failures = [line["rollout/env_failures"] for line in lines[:-1]]
    replaced = [line["rollout/replaced_groups"] for line in lines[:-1]]
    assert sum(replaced) > 0
    assert failures == [4 * count for count in replaced]  # all four members have the seed that fails
    assert [line["rollout/env_timeouts"] for line in lines[:-1]] == (failures if what == "hang" else [0, 0, 0])
    assert [line["rollout/episodes"] for line in lines[:-1]] == [
        8,
        8,
        8,
    ]  # every step trains on full groups all the same
    assert lines[0]["val/Count/failed"] == lines[-1]["val/Count/failed"] > 0  # the same tasks
    assert result.stderr.count("attempts failed, the first: Count, group") == 1
    log = (fake.folder / "out/run.log").read_text()
    assert log.count("member 0, attempt 0: Count.") >= sum(replaced)


def test_an_environment_that_always_fails_ends_the_run_in_one_line(fake: Any) -> None:
    result = fake.command("train", "run.yaml", "custom_envs.Count.env_config={fails: raise}")
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[0].startswith("error: ")
    assert "RuntimeError: the fake environment raises at turn 1" in lines[0]
    assert lines[1:] == ["saved: nothing yet"]


def test_a_prompt_over_the_limit_ends_its_episode_and_keeps_its_turns(lake: Any) -> None:
    lake.train(
        "custom_envs.Lake.env_manager=trajectory", "sequence_length=60", "max_steps=2", "eval_steps=0", "baselines=[]"
    )
    for line in lake.metrics():
        assert line["rollout/stop/length"] > 0
        assert line["rollout/trajectories_without_samples"] == 0
        assert 1 < line["rollout/turns/mean"] < 4
        assert line["tokens/prompt_length/max"] < 60


def test_where_no_prompt_fits_the_run_goes_on_and_says_so(lake: Any) -> None:
    result = lake.train("sequence_length=8", "max_steps=2", "eval_steps=0", "baselines=[]")
    assert [line["rollout/trajectories_without_samples"] for line in lake.metrics()] == [16, 16]
    assert "no token was sampled in 16 episodes" in result.stderr


def test_a_failing_logger_is_switched_off_and_reported_once(fake: Any, whole_fake: Any) -> None:
    (fake.folder / "mine.py").write_text(FAILING)
    result = fake.train(WITH_FILE, "track_with=[failing_logger, {use: jsonl, every: 1}]")
    fake.same(whole_fake)
    (line,) = result.stderr.splitlines()
    assert (
        line
        == "WARNING: logger failing_logger failed in scalars and is switched off: ConnectionError: the tracking server"
        " is away"
    )


@pytest.mark.parametrize(
    ("override", "words", "step"),
    [
        # The weights after step 3 were whole when the engine went; those of a half-made step 4 are not.
        ("actor_infer.strategy_args.strategy_name=failing_backend", "OSError: the engine's process is gone", 3),
        (
            "actor_train.strategy_args.strategy_name=failing_strategy",
            "the run failed: KeyError: 'a mistake in a plugin,\\non two lines'",
            2,
        ),
    ],
)
def test_a_role_that_fails_ends_the_run_in_one_line_that_can_be_resumed(
    fake: Any, whole_fake: Any, override: str, words: str, step: int
) -> None:
    (fake.folder / "mine.py").write_text(FAILING)
    result = fake.command("train", "run.yaml", WITH_FILE, override)
    assert result.exit_code == 1
    *_, error, saved, resume = result.output.splitlines()
    assert error.startswith("error: ")
    assert words in error
    assert saved == f"saved: out/checkpoints/checkpoint-{step:06d}"
    assert "Traceback" in (fake.folder / "out/run.log").read_text()
    command = shlex.split(resume.removeprefix("resume: "))[1:]
    assert command[-1] == "resume_from_checkpoint=true"
    repaired = [part for part in command if part != override]
    assert fake.command(*repaired).exit_code == 0
    fake.same(whole_fake)


def test_a_role_that_hangs_ends_the_run_by_name_and_is_not_waited_for(fake: Any) -> None:
    (fake.folder / "mine.py").write_text(FAILING)
    began = time.monotonic()
    overrides = ["actor_train.strategy_args.strategy_name=hanging_strategy", "runtime_timeout=0.5"]
    result = fake.command("train", "run.yaml", WITH_FILE, *overrides)
    assert time.monotonic() - began < 6
    assert result.exit_code == 1
    assert result.output.splitlines()[0].startswith(
        "error: actor_train: update did not end within runtime_timeout = 0.5 s. Fix: "
    )
    assert result.output.splitlines()[1] == "saved: out/checkpoints/checkpoint-000002"


# ---------------------------------------------------------------- a full disk


def ended_by_the_disk(run: Any, ended: subprocess.CompletedProcess[str], whole: Any) -> None:
    """One line, the old checkpoint is whole, and with room again the run goes on to the same end."""
    assert ended.returncode == 1, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if not line.startswith(("note: ", "WARNING: logger"))]
    assert len(lines) == 3, ended.stderr
    assert lines[0].startswith("error: checkpoint-000004 could not be written to out/checkpoints: ")
    assert "Older checkpoints are untouched. Fix: free space" in lines[0]
    assert lines[1] == "saved: out/checkpoints/checkpoint-000002"
    assert run.checkpoints() == [2]
    resume = shlex.split(lines[2].removeprefix("resume: "))[1:]
    result = run.command(*resume)
    assert result.exit_code == 0, result.output
    run.same(whole)


@pytest.mark.parametrize("function", ["save", "export"])
def test_a_file_that_cannot_grow_while_saving(lake: Any, whole_lake: Any, function: str) -> None:
    """RLIMIT_FSIZE: writes past 4 KiB fail as on a full disk, from the second checkpoint on."""
    ended = lake.process("train", "run.yaml", at=(f"turnwise_torch.strategy:TorchStrategy.{function}", 2, "fill:4096"))
    ended_by_the_disk(lake, ended, whole_lake)


@pytest.fixture
def small_disk(fake: Any) -> Iterator[Path]:
    """A real file system of 2 MiB under the run's output folder, where this user may mount one."""
    disk = fake.folder / "out"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, check=False
    ).returncode:
        pytest.skip("this user may not mount a file system")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_while_saving(fake: Any, whole_fake: Any, small_disk: Path) -> None:
    """A checkpoint of the fakes takes 1.1 MB, their model 0.5: the first fits, the second does not, and it does again
    when there is room."""
    ended = fake.process("train", "run.yaml")
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    ended_by_the_disk(fake, ended, whole_fake)
