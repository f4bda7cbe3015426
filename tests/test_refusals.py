"""What `check` refuses: every line says what to do, and a mistake of the file says where it stands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mutated_values
import pytest
import yaml
from click.testing import CliRunner

from turnwise.cli.main import main
from turnwise.plugins import reset_registry

ROOT = Path(__file__).resolve().parent.parent
ONES = "actor_train.training_args"
INFER = "actor_infer.generating_args"
SCHEDULE = f"{ONES}.lr_scheduler_type"
ARGS = f"{ONES}.lr_scheduler_kwargs"

WRONG: list[tuple[dict[str, Any], str]] = [
    # Numbers.
    ({"gamma": ".nan"}, "gamma: nan is not finite, a finite number is needed"),
    ({f"{ONES}.learning_rate": ".inf"}, "learning_rate: inf is not finite, a finite number is needed"),
    ({f"{ONES}.learning_rate": "-.inf"}, "learning_rate: -inf is not finite"),
    (
        {"custom_envs.Count.env_manager": "{use: trajectory, format_penalty: .inf}"},
        "env_manager.format_penalty: inf is not finite",
    ),
    ({"max_steps": ".inf"}, "max_steps: inf is a number, a whole number is needed"),
    ({"max_steps": "0o17x"}, "max_steps: '0o17x' is text, a whole number is needed"),
    ({"pg_variant.pg_clip": ".inf"}, "pg_variant.pg_clip: inf is not finite"),
    ({"custom_envs.Count.env_config.reward": ".inf"}, "env_config.reward: inf is not finite"),
    ({"custom_envs.Count.env_config.length": "'3'"}, "env_config.length: '3' is text, a whole number is needed"),
    ({"custom_envs.Count.env_config.lenght": "3"}, "no option 'lenght'. Did you mean 'length'?"),
    ({f"{INFER}.top_p": "0"}, "top_p must be above 0"),
    ({f"{INFER}.max_new_tokens": "128"}, "leaves no room for a prompt"),
    # Schedules.
    ({SCHEDULE: "cosin"}, "lr_scheduler_type: 'cosin' is unknown. Did you mean 'cosine'?"),
    ({SCHEDULE: "polynomial", ARGS: "{lr_end: 9}"}, "lr_end: 9 is not below learning_rate 5.0"),
    ({SCHEDULE: "wsd", ARGS: "{num_decay_steps: 60}"}, "decay phase take 61 pipeline steps, and max_steps is 6"),
    ({SCHEDULE: "wsd"}, "needs num_decay_steps"),
    ({SCHEDULE: "linear", ARGS: "{power: 1}"}, "lr_scheduler_kwargs.power: unknown for the schedule linear"),
    ({SCHEDULE: "polynomial", ARGS: "{power: .inf}"}, "lr_scheduler_kwargs.power: inf is not a number"),
    ({SCHEDULE: "wsd", ARGS: "{num_decay_steps: 1, decay_type: cosin}"}, "decay_type: 'cosin' is unknown"),
    ({f"{ONES}.warmup_steps": "9"}, "9 is more than max_steps 6"),
    # Devices.
    ({"runtime": "local", "actor_train.device_mapping": "[0, 1]"}, "2 devices are as many training processes"),
    ({"actor_train.device_mapping": "[0, 0]"}, "names a device twice"),
    # Models, folders, checkpoints.
    ({"pretrain": "no/such/model"}, "'no/such/model' is not a folder with weights.npy"),
    ({"pretrain": "{lettres: ab}"}, "unknown key 'lettres'. Did you mean 'letters'?"),
    ({"output_dir": "/proc/turnwise"}, "output_dir: "),
    ({"resume_from_checkpoint": "nowhere"}, "nowhere is not a checkpoint"),
    # Roles and choices.
    ({"actor_infer.strategy_args.strategy_name": "random"}, "'random' gives no token ids"),
    ({"adv_estimator": "grpoo"}, "no advantage estimator is named 'grpoo'. Did you mean 'grpo'?"),
    ({"adv_estimator": "gae"}, "needs the values of a critic"),
    ({"baselines": "[fake_backend]"}, "needs a model, so it is no baseline"),
    ({"track_with": "[jsonl, jsonl]"}, "'jsonl' is named twice"),
    ({"custom_envs.Count.samplers": "{judge: fake_backend}"}, "needs a model of its own"),
    ({"custom_envs.Count.env_type": "fake_envs"}, "no environment is named 'fake_envs'"),
    ({"train_env_manager.tags": "[Cuont]"}, "'Cuont' is no tag of custom_envs. Did you mean 'Count'?"),
    ({"rollout_batch_size": "9"}, "9 is not num_env_groups 2 × group_size 4 = 8"),
    ({"rollout_mock": "{enable: true}"}, "says not where the rollouts are"),
    ({"plugins": "[turnwise.testing.plugin, turnwise-nowhere]"}, "'turnwise-nowhere' is not installed"),
    ({"plugins": "[turnwise.testing.plugin, ./nowhere.py]"}, "the file './nowhere.py' does not exist"),
    ({"recompute_old_logprobs": "'false'"}, "has nothing to compare them with"),
    ({"use_kl_loss": "false"}, "disagrees with kl_loss_coef"),
    ({"batch_adjust_mode": "by_trajectori"}, "no batch adjust is named 'by_trajectori'"),
]


@pytest.fixture(autouse=True)
def _folder_and_registry_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    reset_registry()


def lines(text: str, *overrides: str) -> tuple[int, list[str]]:
    """The exit code of `check` and the refusals."""
    Path("run.yaml").write_text(text, encoding="utf-8")
    done = CliRunner().invoke(main, ["check", "run.yaml", "--", *overrides])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, [
        line for line in done.stderr.splitlines() if line.startswith(("error: ", "config: ", "machine: "))
    ]


def changed(changes: dict[str, Any]) -> str:
    """The base with values as YAML writes them; a change of a name drops its options."""
    data = yaml.safe_load(mutated_values.BASE)
    for key, value in changes.items():
        *path, last = key.split(".")
        holder = data
        for part in path:
            holder = holder.setdefault(part, {})
        holder[last] = yaml.safe_load(value)
    return yaml.safe_dump(data, sort_keys=False)


@pytest.mark.parametrize(("changes", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_refusal_says_what_is_wrong_where_and_what_to_do(changes: dict[str, Any], words: str) -> None:
    code, found = lines(changed(changes))
    assert code in (2, 3), found
    assert any(words in line for line in found), found
    for line in found:
        assert "Fix: " in line, line
        if not line.startswith("machine: "):
            assert re.match(r"(error|config): run\.yaml:\d+: ", line), line


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train_env_manager.tags[0]=Cuont", "'Cuont' is no tag of custom_envs"),
        ("train_env_manager.tags=[Count, Cuont]", "'Cuont' is no tag of custom_envs"),
        ("track_with[0].every=x", "'x' is text, a whole number is needed"),
        ("gamma=.nan", "gamma: nan is not finite"),
        (f"{ONES}.learning_rate=-.inf", "-inf is not finite"),
        ("max_steps=.5", "0.5 is a number, a whole number is needed"),
    ],
)
def test_an_override_is_blamed_for_what_it_brings(override: str, words: str) -> None:
    code, found = lines(mutated_values.BASE, override)
    assert code == 2
    assert [line for line in found if words in line], found
    for line in found:
        assert line.startswith(f"error: override '{override}'"), line
        assert "Fix: " in line


def test_the_octal_number_of_yaml_is_a_number() -> None:
    code, found = lines(mutated_values.BASE.replace("seed: 1\n", "seed: 0o17\n"))
    assert (code, found) == (0, [])


SAYS = {"Problem": 1, "ConfigError": 0, "MachineError": 0}
"""What makes a refusal, and the place of its text among the arguments."""


def _written(node: ast.AST) -> str | None:
    """The text of a literal, None where it is made elsewhere."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def test_no_refusal_is_written_without_a_fix() -> None:
    """Those that engines, devices or a whole run would be needed for, too."""
    bare = []
    for path in [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/*/src/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if name not in SAYS or len(node.args) <= SAYS[name] or any(k.arg == "warning" for k in node.keywords):  # type: ignore[attr-defined]
                continue
            text = _written(node.args[SAYS[name]])  # type: ignore[attr-defined]
            # A text that ends with what somebody else said may have it there.
            if text is not None and "Fix" not in text and not text.endswith("{}"):
                bare.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text}")  # type: ignore[attr-defined]
    assert bare == []
