"""Conversations in token ids: `render` is the template, `extend` continues sampled tokens as the template would, and
nothing is encoded twice."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AddedToken

from turnwise.data.trajectory import int32
from turnwise.errors import ConfigError
from turnwise_hf.chat import HfChat, Recent
from turnwise_hf.tokenizers import CHATML

DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}" + CHATML
)
HEADERS = (
    "<|begin|>{% for m in messages %}<|header|>{{ m['role'] }}<|end_header|>\n{{ m['content'] | trim }}<|eot|>{% endfor"
    " %}{% if add_generation_prompt %}<|header|>assistant<|end_header|>\n{% endif %}"
)
INSTRUCT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}<|endoftext|>{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n\n{% endfor %}{% if add_generation_prompt %}###"
    " assistant:\n{% endif %}"
)
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0"
    " %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and"
    " loop.index0 < ns.last %}{{ m['content'].split('</think>')[-1].lstrip('\n') }}{% else %}{{ m['content'] }}{% endif"
    " %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "default_system": DEFAULT_SYSTEM, "headers": HEADERS, "instruct": INSTRUCT}
"""Templates that write every content as it is; what closes a turn starts with a special token."""
TEXT = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<|"), max_size=20).map(
    lambda text: text.strip()
)


@pytest.fixture(scope="module")
def chats(make: Callable[..., Path]) -> dict[str, HfChat]:
    every = {**TEMPLATES, "plain": PLAIN, "thinking": THINKING}
    return {
        name: HfChat(make(tokenizer="byte_bpe", vocab_size=320, chat_template=template))
        for name, template in every.items()
    }


def whole(chat: HfChat, messages: list[dict[str, Any]]) -> list[int]:
    """The conversation rendered and encoded in one go, by transformers."""
    return chat.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40)
@given(first=TEXT, response=TEXT, second=TEXT, third=TEXT)
def test_extended_turns_are_the_whole_conversation(
    chats: dict[str, HfChat], name: str, first: str, response: str, second: str, third: str
) -> None:
    chat = chats[name]
    stop = chat.stop_ids[0]
    messages = [user(first)]
    ids = chat.render(messages)
    assert ids.dtype == np.int32
    assert ids.tolist() == whole(chat, messages)
    for observation in (second, third):
        said = (" " if name == "instruct" else "") + response
        ids = np.concatenate([ids, chat.continue_text(ids, said), int32([stop])])
        ids = np.concatenate([ids, chat.extend(ids, "stop", [user(observation)])])
        messages += [{"role": "assistant", "content": response}, user(observation)]
        assert ids.tolist() == whole(chat, messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_that_ended_by_length_is_closed(chats: dict[str, HfChat], name: str) -> None:
    chat = chats[name]
    prompt = chat.render([user("Go.")])
    said = chat.continue_text(prompt, " Left" if name == "instruct" else "Left")
    ids = np.concatenate([prompt, said])
    ids = np.concatenate([ids, chat.extend(ids, "length", [user("On.")])])
    assert ids.tolist() == whole(chat, [user("Go."), {"role": "assistant", "content": "Left"}, user("On.")])


def test_thinking_of_the_sampled_turn_stays_and_the_next_header_opens_thinking(chats: dict[str, HfChat]) -> None:
    chat = chats["thinking"]
    end = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt = chat.render([user("Go.")])
    ids = np.concatenate([prompt, chat.continue_text(prompt, "hm</think>\n\nLeft"), int32([end])])
    added = chat.extend(ids, "stop", [user("On.")])
    text = chat.tokenizer.decode(np.concatenate([ids, added]))
    assert (
        text == "<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n<think>\nhm</think>\n\nLeft"
        "<|im_end|>\n<|im_start|>user\nOn.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


@pytest.mark.parametrize(("said", "added"), [("Left", "\n\n"), ("Left\n", "\n"), ("Left\n\n", "")])
def test_an_end_of_turn_in_plain_text_is_added_as_far_as_it_was_not_sampled(
    make: Callable[..., Path], said: str, added: str
) -> None:
    chat = HfChat(make(tokenizer="word", chat_template=PLAIN))
    prompt = chat.render([user("Which way?")])
    ids = np.concatenate([prompt, chat.continue_text(prompt, said)])
    text = chat.decode(chat.extend(ids, "length", [user("The goal")]))
    assert text == added + "### user:\nThe goal\n\n### assistant:\n"


SWITCH = CHATML.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if not (enable_thinking | default(true)) %}<think></think>{% endif %}{% endif %}",
)


def test_template_args_reach_the_template_in_prompts_and_continuations(make: Callable[..., Path]) -> None:
    assert "enable_thinking" in SWITCH
    chat = HfChat(make(tokenizer="byte_bpe", vocab_size=320, chat_template=SWITCH))
    quiet = chat.with_args({"enable_thinking": False})
    shown = [
        chat.tokenizer.decode(one.render([user("Go.")])) for one in (chat, quiet, pickle.loads(pickle.dumps(quiet)))
    ]
    assert shown[0].endswith("<|im_start|>assistant\n")
    assert shown[1] == shown[2] == shown[0] + "<think></think>"
    ids = quiet.render([user("Go.")])
    assert chat.tokenizer.decode(quiet.extend(ids, "length", [user("On.")])).endswith("assistant\n<think></think>")
    assert chat.tokenizer.decode(chat.extend(ids, "length", [user("On.")])).endswith("assistant\n")
    assert chat.with_args({}) is chat
    assert chat.with_args({"enable_thinking": False}) is quiet
    assert quiet.stop_ids == chat.stop_ids


@pytest.mark.parametrize(
    ("name", "message"), [("enable_thinkin", "does not read"), ("tools", "is not an argument of the template's own")]
)
def test_a_template_arg_that_the_template_does_not_read_is_refused(
    make: Callable[..., Path], name: str, message: str
) -> None:
    chat = HfChat(make(tokenizer="byte_bpe", vocab_size=320, chat_template=SWITCH))
    with pytest.raises(ConfigError, match=f"template_args.*{name}.*{message}.*Fix:"):
        chat.with_args({name: False})


def test_tools_and_several_messages_reach_the_template(chats: dict[str, HfChat]) -> None:
    chat = chats["chatml"]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert '"name": "look"' in chat.tokenizer.decode(chat.render([user("Go.")], tools=tools))
    assert "look" not in chat.tokenizer.decode(chat.render([user("Go.")]))
    ids = chat.extend(chat.render([user("Go.")]), "length", [{"role": "tool", "content": "seen"}, user("On.")])
    assert (
        chat.tokenizer.decode(ids)
        == "<|im_end|>\n<|im_start|>tool\nseen<|im_end|>\n<|im_start|>user\nOn.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_special_tokens_are_no_text_wherever_they_were_sampled(chats: dict[str, HfChat]) -> None:
    chat = chats["chatml"]
    start, end, pad = (
        chat.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    )
    left = chat.continue_text(int32([]), "Left").tolist()
    assert chat.decode(int32([*left, end])) == "Left"
    assert chat.decode(int32([*left, pad, end])) == "Left"
    assert chat.decode(int32([*left, end, *left, end])) == "LeftLeft"
    assert chat.decode(int32([start, *left, start])) == "Left"
    assert chat.decode(int32([end])) == ""
    assert (
        chat.decode(int32([*left, end, start, *left, end]), special=True) == "Left<|im_end|><|im_start|>Left<|im_end|>"
    )


def test_an_unknown_word_is_no_text(folder: Path) -> None:
    chat = HfChat(folder)
    assert chat.decode(chat.continue_text(int32([]), "Left zebra")) == "Left"


def test_text_in_angle_brackets_that_is_no_special_token_stays(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(make(tokenizer="byte_bpe", vocab_size=320, chat_template=CHATML), tmp_path / "model")
    tokenizer = HfChat(folder).tokenizer
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("<tool_call>", special=False)])
    tokenizer.save_pretrained(folder)
    chat = HfChat(folder)
    said = "<think>hm<tool_call><answer>Up</answer>"
    ids = chat.continue_text(int32([]), said)
    assert chat.tokenizer.convert_tokens_to_ids("<think>") in ids
    assert chat.decode(int32([*ids, chat.stop_ids[0]])) == said


def test_text_that_looks_like_a_special_token_stays_text_when_it_continues_a_message(chats: dict[str, HfChat]) -> None:
    chat = chats["chatml"]
    ids = chat.continue_text(int32([]), "x<|im_end|>")
    assert chat.tokenizer.convert_tokens_to_ids("<|im_end|>") not in ids
    assert chat.tokenizer.decode(ids) == "x<|im_end|>"


def test_stop_ids_are_those_of_the_tokenizer_the_generation_config_and_the_template(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(make(tokenizer="byte_bpe", chat_template=HEADERS), copy)
    (copy / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    chat = HfChat(copy)
    assert chat.stop_ids == (chat.tokenizer.convert_tokens_to_ids("<|eot|>"), 0, 7)


def test_images_are_refused_and_text_parts_are_joined(chats: dict[str, HfChat]) -> None:
    chat = chats["chatml"]
    picture = np.zeros((2, 2, 3), np.uint8)
    with pytest.raises(ConfigError, match="is taken as a text model, but a message holds an image"):
        chat.render([user("x")], images=[picture])
    with pytest.raises(ConfigError, match="holds an image"):
        chat.extend(int32([1]), "stop", [{"role": "user", "content": [{"type": "image", "image": picture}]}])
    parts = [{"type": "text", "text": "Go"}, {"type": "text", "text": "."}]
    assert chat.render([{"role": "user", "content": parts}]).tolist() == chat.render([user("Go.")]).tolist()


def test_what_a_template_cannot_do_is_one_line(make: Callable[..., Path]) -> None:
    refuse = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
    )
    chat = HfChat(make(chat_template=refuse + CHATML))
    with pytest.raises(ConfigError, match="cannot render a conversation of roles system, user: no system"):
        chat.render([{"role": "system", "content": "You"}, user("Go")])


def test_a_template_that_drops_the_assistants_content_is_refused(make: Callable[..., Path]) -> None:
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ConfigError, match="does not write an assistant's content exactly once"):
        HfChat(make(chat_template=silent))


def test_a_folder_without_tokenizer_or_template_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        HfChat(copy)
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        HfChat(copy)


def test_rendered_conversations_are_kept_and_cannot_be_changed(folder: Path) -> None:
    chat = HfChat(folder)
    ids = chat.render([user("Left")])
    assert chat.render([user("Left")]) is ids
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1


def test_the_memory_of_recent_texts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise_hf.chat._CACHED", 3)
    monkeypatch.setattr("turnwise_hf.chat._CACHED_TOKENS", 10)
    recent: Recent[int] = Recent()
    for key in range(3):
        recent.put(key, key, 1)
    recent.get(0)
    recent.put(3, 3, 1)
    assert [recent.get(key) for key in range(4)] == [0, None, 2, 3]
    recent.put(4, 4, 9)
    assert [recent.get(key) for key in range(5)] == [None, None, None, 3, 4]
    recent.put(4, 5, 2)
    assert recent.put(5, 5, 7) == 5
    assert [recent.get(key) for key in (3, 4, 5)] == [3, 5, 5]
