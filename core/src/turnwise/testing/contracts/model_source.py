"""What every model source keeps: a folder that can be prepared again, and a chat whose continuation equals the whole
dialogue rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise.contracts.chat import ModelSourceContext
from turnwise.errors import ConfigError, MachineError, Problem
from turnwise.testing.subject import Subject

KIND = "model_source"


def build(implementation: Subject, cache: Path) -> Any:
    """The source with its context, or one whose cache is `cache`."""
    cache.mkdir(exist_ok=True)
    return implementation.build(implementation.supplied.get("context", ModelSourceContext(cache)))


def prepared(implementation: Subject, cache: Path) -> tuple[Any, Path]:
    """The source, and the folder of the supplied model."""
    source = build(implementation, cache)
    return source, source.prepare(implementation.need("pretrain"))


def user(text: str) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": text}


def test_prepare_gives_a_model_folder_and_gives_it_again(implementation: Subject, tmp_path: Path) -> None:
    """In Hugging Face layout, the same from the cache."""
    source, folder = prepared(implementation, tmp_path / "cache")
    assert (folder / "config.json").is_file(), (
        "the prepared folder has no config.json; it must be in Hugging Face layout."
    )
    assert source.check(implementation.need("pretrain")) == []
    _, again = prepared(implementation, tmp_path / "cache")
    assert (again / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_what_is_not_a_model_is_refused_before_it_is_prepared(implementation: Subject, tmp_path: Path) -> None:
    """As a Problem of `check`; `prepare` raises."""
    source = build(implementation, tmp_path / "cache")
    (tmp_path / "empty").mkdir()
    for wrong in (str(tmp_path / "empty"), {"no_such_key": 1}):
        found = source.check(wrong)
        assert found, f"check finds nothing wrong with pretrain: {wrong!r}."
        assert all(isinstance(problem, Problem) for problem in found), f"check gave {found[0]!r}, no errors.Problem."
        with pytest.raises((ConfigError, MachineError)):
            source.prepare(wrong)


def test_rendered_ids_are_int32_and_the_same_twice(implementation: Subject, tmp_path: Path) -> None:
    """Int32 [n], and an id that ends the assistant's turn."""
    source, folder = prepared(implementation, tmp_path / "cache")
    chat, text = source.chat(folder), implementation.need("texts")[0]
    ids = chat.render([user(text)])
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    np.testing.assert_array_equal(ids, source.chat(folder).render([user(text)]))
    assert chat.stop_ids, "the chat has no id that ends an assistant's turn."


def test_an_argument_that_the_template_does_not_read_is_refused(implementation: Subject, tmp_path: Path) -> None:
    """It would change nothing."""
    source, folder = prepared(implementation, tmp_path / "cache")
    chat, text = source.chat(folder), implementation.need("texts")[0]
    np.testing.assert_array_equal(chat.with_args({}).render([user(text)]), chat.render([user(text)]))
    with pytest.raises(ConfigError):
        chat.with_args({"no_such_argument": True})


def test_text_that_continues_a_prompt_decodes_to_itself(implementation: Subject, tmp_path: Path) -> None:
    """What the environment reads is what was sampled."""
    source, folder = prepared(implementation, tmp_path / "cache")
    chat = source.chat(folder)
    for text in implementation.need("texts"):
        written = chat.continue_text(chat.render([user(text)]), text)
        assert chat.decode(written).strip() == text
        assert chat.decode(np.append(written, np.int32(chat.stop_ids[0]))).strip() == text, (
            "decode shows the end of the turn."
        )


def test_special_tokens_are_no_text_wherever_they_were_sampled(implementation: Subject, tmp_path: Path) -> None:
    """No environment reads the marks of a template."""
    source, folder = prepared(implementation, tmp_path / "cache")
    chat = source.chat(folder)
    for text in implementation.need("texts"):
        written = chat.continue_text(chat.render([user(text)]), text)
        for stop in chat.stop_ids:
            shown = chat.decode(np.array([stop], np.int32), special=True)
            middle = chat.decode(np.concatenate([written, [np.int32(stop)], written]))
            assert not shown or shown not in middle, (
                f"decode shows {shown!r} in the middle of a response; environments would read it."
            )
        assert not chat.begins_image(written), f"begins_image takes {text!r} for an image."


def test_the_continuation_equals_the_whole_dialogue_rendered(implementation: Subject, tmp_path: Path) -> None:
    """Tokens of earlier turns stay as they were sampled."""
    source, folder = prepared(implementation, tmp_path / "cache")
    chat = source.chat(folder)
    for text in implementation.need("texts"):
        prompt = chat.render([user(text)])
        whole = chat.render([user(text), {"role": "assistant", "content": text}, user(text)])
        written = np.concatenate([prompt, chat.continue_text(prompt, text)])
        # Cut by the limit, and closed by the model: the template's end of the turn is owed in the first alone.
        for finish, so_far in (("length", written), ("stop", np.append(written, np.int32(chat.stop_ids[0])))):
            continued = np.concatenate([so_far, chat.extend(so_far, finish, [user(text)])])
            np.testing.assert_array_equal(
                continued, whole, f"after finish {finish!r} prompt + response + extend is not the rendered dialogue."
            )
