"""What a logger is told of the configuration: everything but keys and passwords."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from turnwise.config.loader import load
from turnwise.config.masking import shown_override, without_secrets
from turnwise.errors import ConfigError
from turnwise.planning import assembly


def test_texts_under_names_of_secrets_are_masked_and_nothing_else() -> None:
    plain = {
        "api_key": "sk-1",
        "tools": [{"serper_apiKey": "x", "HF_TOKEN": "hf_1", "db_password": "p", "client_secret": "s", "api_key": ""}],
        "max_new_tokens": 4,
        "access_token": None,
        "ratio_type": "token",
        "api_key_env": "OPENAI_API_KEY",
        "eos_token": "<eos>",
        "password": "${oc.env:DB_PASSWORD}",
        "nested": {"secret_keys": ["a", "b"], "access_key": {"of one": "c"}, "headers": {"Authorization": "Bearer d"}},
        "proxy": "https://us:abc@host/x",
    }
    assert without_secrets(plain) == {
        **plain,
        "api_key": "***",
        "tools": [
            {"serper_apiKey": "***", "HF_TOKEN": "***", "db_password": "***", "client_secret": "***", "api_key": ""}
        ],
        "nested": {
            "secret_keys": ["***", "***"],
            "access_key": {"of one": "***"},
            "headers": {"Authorization": "***"},
        },
        "proxy": "https://us:***@host/x",
    }


def test_the_value_of_a_secret_variable_is_masked_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "0123456789")
    monkeypatch.setenv("OTHER_API_KEY", "EMPTY")
    assert without_secrets({"url": "https://u:0123456789@host", "b": ["EMPTY"]}) == {
        "url": "https://u:***@host",
        "b": ["EMPTY"],
    }


def test_loggers_get_the_configuration_without_secrets(toy: Callable[..., Path]) -> None:
    loaded = load(toy(vars={"hf_token": "hf_of_the_file"}, exp_name="trial"))
    context = assembly.logger_context(loaded.config, loaded.plain())
    assert context.config["vars"] == {"hf_token": "***"}
    assert context.config["exp_name"] == "trial"


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("track_with[0].api_key=sk-1", "track_with[0].api_key=***"),
        ("vars={wandb: {api_key: sk-1}}", "vars=***"),
        ("vars.secrets=[a, b]", "vars.secrets=***"),
        ("vars.proxy=https://us:abc@host/x", "vars.proxy=https://us:***@host/x"),
        ("vars.password=${oc.env:DB_PASSWORD}", "vars.password=${oc.env:DB_PASSWORD}"),
        ("actor_infer.generating_args.max_new_tokens=4", "actor_infer.generating_args.max_new_tokens=4"),
        ("vars.api_key={a: [", "vars.api_key=***"),
        ("api_key", "api_key"),
    ],
)
def test_an_override_is_shown_without_the_secret_that_it_gives(override: str, shown: str) -> None:
    assert shown_override(override) == shown


KEY = "sk-0123456789"


@pytest.mark.parametrize(
    "override",
    [
        f"trackers.api_key={KEY}",
        f"track_with=[{{use: fake, api_key: {KEY}}}]",
        f"max_steps.api_key={KEY}",
        f"actor_train.api_key=[{KEY}",
        f"seed={{api_key: {KEY}}}",
        f"exp_name={{password: [{KEY}]}}",
    ],
)
def test_no_message_repeats_a_secret_of_an_override(toy: Callable[..., Path], override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(toy(), [override])
    text = "\n".join([*caught.value.problems, *caught.value.besides])
    assert KEY not in text
    assert "***" in text


def test_no_message_repeats_a_secret_of_the_file(toy: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"'\*\*\*'.* is a mapping, a whole number is needed") as caught:
        load(toy(seed={"api_key": KEY}))
    assert KEY not in str(caught.value)
