"""Overrides, interpolation, included files and device lists, and the places that the report names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yaml_runs import Run, problems

from turnwise.config import load
from turnwise.config.foreign.translate import parse_devices
from turnwise.plugins import Registry


def test_overrides_are_typed_and_applied_in_order(run_yaml: Run) -> None:
    config = run_yaml(
        "",
        "actor_train.training_args.learning_rate=3e-4",
        "max_steps=5",
        "max_steps=7",
        "+seed=3",
        "train_env_manager.tags=[Lake]",
        "exp_name=a=b",
    ).config
    assert (config.actor_train.training_args.learning_rate, config.max_steps, config.seed, config.exp_name) == (
        3e-4,
        7,
        3,
        "a=b",
    )
    assert config.actor_train.training_args.per_device_train_batch_size == 2


def test_an_override_may_go_inside_a_choice_by_name_and_into_lists(run_yaml: Run) -> None:
    config = run_yaml("track_with: [console, jsonl]\n", "pg_variant.pg_clip=0.3", "track_with[1]=wall").config
    assert config.pg_variant.config.pg_clip == 0.3
    assert [c.name for c in config.track_with] == ["console", "wall"]


def test_an_override_is_applied_before_interpolation(run_yaml: Run) -> None:
    assert run_yaml("vars: {n: 3}\nsave_steps: ${vars.n}\n", "vars.n=5").config.save_steps == 5


def test_a_null_override_unsets(run_yaml: Run) -> None:
    assert run_yaml("logging_dir: logs\n", "logging_dir=null").config.logging_dir is None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("max_steps", "override 'max_steps': $.max_steps: an override is written key=value."),
        ("~max_steps", "override '~max_steps': $.~max_steps: an override is written key=value."),
        (
            "max_steps.x=1",
            (
                "override 'max_steps.x=1': $.max_steps.x: max_steps is 10, which holds no keys. Fix: override max_steps"
                " itself"
            ),
        ),
        ("max_steps=[1", "override 'max_steps=[1': $.max_steps: '[1' cannot be put here"),
        ("max_stepz=1", "override 'max_stepz=1': $.max_stepz: unknown key 'max_stepz'. Did you mean 'max_steps'?"),
        ("actor_train.lr=1", "override 'actor_train.lr=1': $.actor_train.lr: unknown key 'lr'."),
        (
            "train_env_manager.tags[4]=x",
            "override 'train_env_manager.tags[4]=x': $.train_env_manager.tags[4]: 'x' cannot be put here",
        ),
    ],
)
def test_a_bad_override_is_named(run_yaml: Run, override: str, expected: str) -> None:
    found = problems(run_yaml, "", override)
    assert any(line.startswith(expected) for line in found), found


def test_interpolation_reads_keys_environment_and_time(run_yaml: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_NAME", "lake")
    config = run_yaml(
        "exp_name: ${oc.env:RUN_NAME}\noutput_dir: out/${exp_name}/${now:%Y}\nsave_steps: ${max_steps}\n"
    ).config
    assert config.output_dir.startswith("out/lake/20")
    assert config.save_steps == 10


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            "${max_step}",
            "'${max_step}' cannot be resolved: Interpolation key 'max_step' not found. Did you mean 'max_steps'?",
        ),
        ("${oc.env:NOT_SET_ANYWHERE}", "Environment variable 'NOT_SET_ANYWHERE' not found"),
        ("${hydra:run.dir}", "Unsupported interpolation type hydra"),
        ("${exp_name", "is not a well-formed interpolation"),
        ("${exp_name}", "'${exp_name}' cannot be resolved: Recursive interpolation detected"),
        ("'???'", "'???' stands for a value that must be given"),
    ],
)
def test_an_interpolation_that_fails_is_told_once_with_its_line(run_yaml: Run, value: str, expected: str) -> None:
    found = problems(run_yaml, f"exp_name: {value}\n")
    assert len(found) == 1
    assert found[0].startswith("run.yaml:16: $.exp_name: ")
    assert expected in found[0]


def test_a_failed_value_is_not_reported_again_where_it_is_copied(run_yaml: Run) -> None:
    found = problems(run_yaml, "exp_name: ${nope}\noutput_dir: out/${exp_name}\n")
    assert len(found) == 1


def test_text_of_an_environment_variable_is_no_number(run_yaml: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("N", "7")
    assert "'7' is text" in problems(run_yaml, "save_steps: ${oc.env:N}\n")[0]
    assert run_yaml("save_steps: ${oc.decode:${oc.env:N}}\n").config.save_steps == 7


def test_free_keys_that_are_read_become_vars_with_a_note(run_yaml: Run) -> None:
    loaded = run_yaml("my_size: 6\nsave_steps: ${my_size}\nvars: {other: 1}\n")
    assert loaded.config.vars == {"my_size": 6, "other": 1}
    assert loaded.notes == [
        "run.yaml:16: $.my_size: free values, which only ${…} reads and which may also stand under vars: my_size"
    ]


def test_a_free_key_that_nothing_reads_is_an_error(run_yaml: Run) -> None:
    assert problems(run_yaml, "gamam: 6\n") == [
        "run.yaml:16: $.gamam: unknown key 'gamam'. Did you mean 'gamma'? Fix: correct or remove it"
    ]


def test_included_files_lie_under_this_one_and_interpolate_with_it(run_yaml: Run, base_yaml: str) -> None:
    Path("config").mkdir()
    Path("config/envs.yaml").write_text(
        "library_of_values: 3\nturns: 5\nblocks:\n  Pond:\n    env_type: lake\n    max_steps: ${turns}\n    env_config:"
        " {is_slippery: true}\n"
    )
    text = "defaults:\n  - config/envs@_here_\n  - _self_\nturns: 7\n"
    loaded = run_yaml(text + base_yaml + "  Pond: ${blocks.Pond}\n", base=False)
    assert loaded.config.custom_envs["Pond"].max_steps == 7
    assert loaded.config.vars["library_of_values"] == 3
    assert (
        run_yaml(text + base_yaml + "  Pond: ${blocks.Pond}\n", "turns=9", base=False)
        .config.custom_envs["Pond"]
        .max_steps
        == 9
    )
    Path("config/envs.yaml").write_text("blocks:\n  Pond: {env_type: lake, max_stepz: 3}\n")
    found = problems(run_yaml, text + base_yaml + "  Pond: ${blocks.Pond}\nsave_steps: ${turns}\n", base=False)
    assert len(found) == 1
    assert found[0].startswith("config/envs.yaml:2: $.custom_envs.Pond.max_stepz: unknown key")


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            "envs@_here_",
            (
                "run.yaml:17: $.defaults[0]: 'envs' is neither a file beside this one nor a preset. Installed presets:"
                " trainer_zero3."
            ),
        ),
        (
            "../config/trainer_zero@_here_",
            "'../config/trainer_zero' is neither a file beside this one nor a preset. Did you mean 'trainer_zero3'?",
        ),
        ("{db: mysql}", "selects from a group, which is not supported. Fix: name the file: `- db/mysql@_here_`"),
        ("envs@other", "'envs@other' merges under 'other'; only the top level is supported"),
        ("run@_here_", "'run@_here_' includes itself"),
        ("3", "3 is not the name of a file"),
        ("broken", "broken.yaml:2: not valid YAML"),
    ],
)
def test_anything_else_under_defaults_is_refused_with_the_line_to_write(
    run_yaml: Run, entry: str, expected: str
) -> None:
    Path("broken.yaml").write_text("a: [\n")
    found = problems(run_yaml, f"defaults:\n  - {entry}\n")
    assert any(expected in line for line in found), found


def test_presets_of_installed_strategies_are_named_by_interpolation(run_yaml: Run) -> None:
    override = "actor_train.strategy_args.strategy_config=${trainer_zero3}"
    loaded = run_yaml("", override)
    assert loaded.config.actor_train.strategy_args is not None
    assert loaded.config.actor_train.strategy_args.config.stage == 3
    assert any("preset" in note for note in loaded.notes)
    same = run_yaml("defaults: [../config/trainer_zero3@_here_]\n", override)
    assert same.config == loaded.config


def test_a_file_of_a_presets_name_wins(run_yaml: Run) -> None:
    Path("trainer_zero3.yaml").write_text("trainer_zero3: {stage: 1}\n")
    loaded = run_yaml(
        "defaults: [trainer_zero3@_here_]\n", "actor_train.strategy_args.strategy_config=${trainer_zero3}"
    )
    assert loaded.config.actor_train.strategy_args is not None
    assert loaded.config.actor_train.strategy_args.config.stage == 1


@pytest.mark.parametrize(
    ("text", "devices"),
    [("list(range(0,4))", [0, 1, 2, 3]), ("list(range(4))", [0, 1, 2, 3]), ("list(range(0, 8, 2))", [0, 2, 4, 6]), ("[0, 3]", [0, 3]), ("[]", []),
     ("list(range(0,2)) + list(range(6,8))", [0, 1, 6, 7]), ("list(range(1,1,0))", None), ("__import__('os')", None), ("list(range(10**9))", None),
     ("list(range(999999999))", None), ("", None)],
)  # fmt: skip
def test_device_lists_are_parsed_and_never_evaluated(text: str, devices: list[int] | None) -> None:
    assert parse_devices(text) == devices


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 5))
def test_ranges_are_pythons(start: int, stop: int, step: int) -> None:
    assert parse_devices(f"list(range({start}, {stop}, {step}))") == list(range(start, stop, step))


def test_device_mappings_interpolate(run_yaml: Run) -> None:
    config = run_yaml("n: 2\n", "actor_train.device_mapping=list(range(0,${n}))").config
    assert config.actor_train.device_mapping == (0, 1)
    assert problems(run_yaml, "", "actor_train.device_mapping=four")[0].endswith(
        "'four' is not a list of devices. Fix: device_mapping: [0, 1], or list(range(0,4))"
    )


def test_the_resolved_text_loads_to_the_same_configuration_from_any_folder(
    run_yaml: Run, fake_registry: Registry, tmp_path: Path
) -> None:
    Path("plug.py").write_text("import turnwise\n\n@turnwise.hookimpl\ndef loggers():\n    return []\n")
    loaded = run_yaml(
        "plugins: [./plug.py]\nfree: 6\nsave_steps: ${free}\nexp_name: \\${kept}\n", "pg_clip=0.3", "max_steps=12"
    )
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "again.yaml").write_text(loaded.text)
    again = load(other / "again.yaml", registry=fake_registry).config
    assert again.exp_name == "${kept}"
    assert again.plugins == (str(tmp_path / "plug.py"),)
    assert (again.save_steps, again.max_steps, again.pg_variant, again.vars) == (
        6,
        12,
        loaded.config.pg_variant,
        {"free": 6},
    )
