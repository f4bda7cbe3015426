"""The field's keys: one rule for each that is translated, does not apply, or belongs to a feature that this version
lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from turnwise.config.foreign.roll import ROLL_RULES
from turnwise.config.foreign.translate import NOTHING, Edit, Rule, alias, ignore, later, move, parse_devices
from turnwise.config.problems import at, dotted
from turnwise.config.schema import ROLES, CustomEnv
from turnwise.errors import listed

MANAGER_CLASSES: dict[str, dict[str, Any]] = {
    "TrajEnvManager": {"use": "trajectory"},
    "VLTrajEnvManager": {"use": "trajectory"},
    "StepEnvManager": {"use": "stepwise"},
    "StepConcatEnvManager": {"use": "stepwise", "merge_steps": True},
    "AgentNativeStepEnvManager": {"use": "agent_native"},
    "ProxyEnvManager": {"use": "agent_native"},
}
GAME_RUNNERS = ("GEMRunner",)
"""Runners that play an environment turn by turn, which is what a manager does here."""
KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
ATTENTION = {"fa2": "flash_attention_2"}


def _manager_block(edit: Edit, tag: Any) -> dict[str, Any] | None:
    """The mapping of a tag's env_manager, made from its short form; None when it is neither a name nor a mapping."""
    env = edit.get("custom_envs", tag)
    value = env.setdefault("env_manager", attrs.fields_dict(CustomEnv)["env_manager"].default.factory().name)  # type: ignore[union-attr]
    if isinstance(value, str):
        env["env_manager"] = {"use": value}
    return env["env_manager"] if isinstance(env["env_manager"], dict) else None


def _to_manager(edit: Edit) -> None:
    """An option that here belongs to the tag's environment manager."""
    tag, option = edit.path[1], edit.path[-1]
    edit.drop()
    if _manager_block(edit, tag) is None:
        return
    target = ("custom_envs", tag, "env_manager", option)
    if edit.put(target, edit.value):
        # The chosen manager may have no such option, which is a warning then: the file was written for another.
        edit.loose.add(target)
        edit.note(f"is {dotted(target)} here")


def _manager_class(edit: Edit) -> None:
    edit.drop()
    block = MANAGER_CLASSES.get(str(edit.value).rpartition(".")[2])
    runner = str(edit.get(*edit.path[:-1], "agent_runner_cls")).rpartition(".")[2]
    if block is not None and runner in GAME_RUNNERS:
        block = {"use": "trajectory"}
    known = [e.name for e in edit.registry.entries("env_manager")]
    if block is None or block["use"] not in known:
        here = f" ({block['use']} here, which nothing installed brings)" if block else ""
        edit.refuse(f"{edit.value!r}{here} has no counterpart. Installed: {listed(known)}", "env_manager: NAME")
    elif edit.put((*edit.path[:-1], "env_manager"), block["use"] if len(block) == 1 else dict(block)):
        edit.note(f"is env_manager: {block['use']}{' with merge_steps' * (len(block) > 1)} here")


def _runner_class(edit: Edit) -> None:
    edit.drop()
    if edit.value is None:
        edit.report.warn(edit.path, f"does not apply: {edit.why}")
    elif str(edit.value).rpartition(".")[2] in GAME_RUNNERS:
        edit.note("is what the tag's env_manager does here")
    else:
        edit.refuse(f"{edit.value!r} has no counterpart: an episode is played by its manager", "env_manager: NAME")


def _template(edit: Edit) -> None:
    """A template of the manager's, without the placeholder of what ROLL's environments give beside the observation."""
    if isinstance(edit.value, str) and "{suffix}" in edit.value:
        edit.value = edit.value.replace("{suffix}", "")
        edit.note("{suffix} is left out: environments put all that belongs to a prompt into the observation here")
    _to_manager(edit)


def _manager_penalty(edit: Edit) -> None:
    """The penalty of a whole train/val_env_manager goes to the managers of its tags; a tag's own stands."""
    edit.drop()
    tags = edit.get(edit.path[0], "tags")
    environments = edit.get("custom_envs")
    for tag in tags if isinstance(tags, list) else []:
        if not isinstance(environments, dict) or not isinstance(environments.get(tag), dict):
            continue
        block = _manager_block(edit, tag)
        if block is not None and "format_penalty" not in block:
            target = ("custom_envs", tag, "env_manager", "format_penalty")
            edit.put(target, edit.value)
            edit.loose.add(target)
    edit.note("is format_penalty of the tags' env_manager here; a tag's own stands")


def _turns(edit: Edit) -> None:
    """max_actions_per_traj of the whole run: for the environments that do not say."""
    edit.drop()
    environments = edit.get("custom_envs")
    for tag, env in environments.items() if isinstance(environments, dict) else ():
        if isinstance(env, dict) and "max_steps" not in env:
            edit.put(("custom_envs", tag, "max_steps"), edit.value)
    edit.note("is max_steps of the environments that have none of their own")


def _thread_lock(edit: Edit) -> None:
    edit.drop()
    if edit.value is True and edit.get(*edit.path[:-1], "max_env_step_concurrent") is NOTHING:
        edit.put((*edit.path[:-1], "max_env_step_concurrent"), 1)
        edit.note("is max_env_step_concurrent: 1 here")
    elif edit.value is True:
        edit.note("max_env_step_concurrent says how many step at once")


def _group_size(edit: Edit) -> None:
    """n responses to a prompt are a group of n members; rollout_batch_size then counted prompts."""
    edit.drop()
    n, batch = edit.value, edit.get("rollout_batch_size")
    if n is None or (n == 1 and type(n) is int):
        edit.note("one response each is what happens anyway")
        return
    if type(n) is not int or n < 1 or edit.path[0] not in ("actor_infer", "num_return_sequences_in_group"):
        edit.refuse(f"{n!r} responses to a prompt cannot be had here", "train_env_manager.group_size: N")
        return
    groups = edit.get("train_env_manager", "num_env_groups")
    counted = edit.get("train_env_manager", "group_size") == n and type(groups) is int and groups * n == batch
    if counted or not edit.put(("train_env_manager", "group_size"), n):
        return
    if type(batch) is int and edit.put(("train_env_manager", "num_env_groups"), batch):
        edit.data["rollout_batch_size"] = batch * n
        edit.note(
            f"is group_size {n}; rollout_batch_size {batch} counted prompts: num_env_groups {batch}, rollout_batch_size"
            f" {batch * n} here"
        )


def _lengths(edit: Edit) -> None:
    """prompt_length + response_length; the second rule finds what the first left."""
    prompt, response = edit.data.pop("prompt_length", NOTHING), edit.data.pop("response_length", NOTHING)
    if response is not NOTHING:
        edit.path, edit.value = ("response_length",), response
        if edit.put(("actor_infer", "generating_args", "max_new_tokens"), response):
            edit.note("is max_new_tokens here")
    if prompt is NOTHING:
        return
    edit.path, edit.value = ("prompt_length",), prompt
    if type(prompt) is not int or type(response) is not int:
        edit.refuse(
            "prompt_length needs response_length beside it, both whole numbers",
            "write sequence_length and max_new_tokens",
        )
    elif edit.data.get("sequence_length", prompt + response) != prompt + response:
        total = f"prompt_length {prompt} + response_length {response} = {prompt + response}"
        edit.refuse(
            f"{total}, but sequence_length is {edit.data['sequence_length']!r}",
            "keep sequence_length and max_new_tokens alone",
        )
    elif edit.put(("sequence_length",), prompt + response):
        edit.note(f"prompt_length + response_length is sequence_length {prompt + response} here")


def _checkpoint_config(edit: Edit) -> None:
    edit.drop()
    block = edit.value if isinstance(edit.value, Mapping) else {}
    if edit.value is not None and not isinstance(edit.value, Mapping):
        edit.refuse(f"{edit.value!r} is not a mapping", "output_dir: FOLDER")
    elif block.get("type", "file_system") != "file_system":
        edit.refuse(f"checkpoints of type {block['type']!r} are not supported", "output_dir: FOLDER")
    for key in sorted(set(map(str, block)) - {"type", "output_dir"}):
        edit.report.error((*edit.path, key), f"unknown key {key!r}. Fix: remove it; checkpoints go to output_dir")
    folder = block.get("output_dir")
    if folder is None:
        return
    own = edit.data.setdefault("output_dir", folder)
    if own != folder:
        edit.report.warn((*edit.path, "output_dir"), f"has no effect: checkpoints go to output_dir {own!r}")
    else:
        edit.report.sources.moved.setdefault(("output_dir",), (*edit.path, "output_dir"))
        edit.note("is output_dir here")


def _tracker_options(edit: Edit) -> None:
    """Options beside track_with: of the one tracker, or by the tracker's name."""
    edit.drop()
    if not edit.value:
        return
    trackers = edit.get("track_with")
    names = [trackers] if isinstance(trackers, str) else trackers
    if not isinstance(edit.value, dict) or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        edit.refuse("tracker_kwargs needs track_with: NAME beside it", "track_with: [{use: NAME, option: value}]")
        return
    # Mappings under the names of trackers are theirs; anything else can only be the options of a single one.
    by_name = all(key in names and isinstance(value, dict) for key, value in edit.value.items())
    if not by_name and len(names) != 1:
        edit.refuse(
            f"whose options these are is not clear among {', '.join(names)}", "track_with: [{use: NAME, option: value}]"
        )
        return
    made: list[Any] = list(names)
    for name, options in edit.value.items() if by_name else [(names[0], edit.value)]:
        i = names.index(name)
        made[i] = {"use": name, **options}
        for option in options:
            edit.loose.add(("track_with", i, option))
            edit.report.sources.moved["track_with", i, option] = (
                (*edit.path, name, option) if by_name else (*edit.path, option)
            )
    edit.data["track_with"] = made
    edit.note("holds the options of track_with here")


def _role_environment(edit: Edit) -> None:
    """system_envs of the whole run: under those of every role."""
    edit.drop()
    for role in [r for r in ROLES if r.startswith("actor") or isinstance(edit.data.get(r), dict)]:
        block = edit.data.setdefault(role, {})
        if isinstance(edit.value, dict) and isinstance(block, dict):
            # What a role says of itself stands.
            own = block.get("system_envs") or {}
            block["system_envs"] = {**edit.value, **own}
            edit.report.sources.moved.update(
                {(role, "system_envs", key): (*edit.path, key) for key in edit.value if key not in own}
            )
    edit.note("is system_envs of every role here")


def _text_values(edit: Edit) -> None:
    # Environment variables are text, whatever YAML makes of them.
    if isinstance(edit.value, dict):
        edit.value.update({k: str(v) for k, v in edit.value.items() if type(v) in (int, float)})


def _devices(edit: Edit) -> None:
    holder = at(edit.data, edit.path[:-1])
    if edit.value is None:
        edit.drop()
    elif isinstance(edit.value, str):
        devices = parse_devices(edit.value)
        if devices is None:
            edit.drop()
            edit.refuse(f"{edit.value!r} is not a list of devices", "device_mapping: [0, 1], or list(range(0,4))")
        else:
            holder[edit.path[-1]] = devices


def _frozen_of_role(edit: Edit) -> None:
    edit.drop()
    target = (edit.path[0], "model_args", "freeze_module_prefix")
    if edit.value and edit.put(target, edit.value):
        edit.note(f"is {dotted(target)} here")


def _prefixes(edit: Edit) -> None:
    """One name, or several with commas between."""
    if edit.value is None:
        edit.drop()
    elif isinstance(edit.value, str):
        at(edit.data, edit.path[:-1])[edit.path[-1]] = [name.strip() for name in edit.value.split(",") if name.strip()]


def _ratio(edit: Edit) -> None:
    """The field's files write floats, of which the whole ones are numbers of batches."""
    if isinstance(edit.value, float) and edit.value.is_integer():
        at(edit.data, edit.path[:-1])[edit.path[-1]] = int(edit.value)
        edit.note(f"{edit.value} is {int(edit.value)} here")
    elif type(edit.value) is not int:
        edit.refuse(f"{edit.value!r}: {edit.path[-1]} must be a whole number, at least 0", "0, 1 or 2")
        edit.drop()


def _old_logprobs(edit: Edit) -> None:
    if isinstance(edit.value, bool):
        edit.data["recompute_old_logprobs"] = str(edit.value).lower()


def _recompute(edit: Edit) -> None:
    edit.drop()
    if edit.put(("recompute_old_logprobs",), edit.value):
        edit.note("is recompute_old_logprobs here")


def _sampling(edit: Edit) -> None:
    edit.drop()
    if edit.value is False:
        at(edit.data, edit.path[:-1])["temperature"] = 0
        edit.note("is temperature: 0 here")
    elif edit.value is True:
        edit.note("is what happens anyway; temperature: 0 is greedy")
    else:
        edit.refuse(f"{edit.value!r} is neither true nor false", "temperature: T (0 is greedy)")


def _top_k(edit: Edit) -> None:
    if type(edit.value) is int and edit.value == -1:
        at(edit.data, edit.path[:-1])["top_k"] = 0
        edit.note("-1 is top_k: 0 here, off")


def _group_filter(edit: Edit) -> None:
    edit.drop()
    if edit.value is not None:
        known = listed(e.name for e in edit.registry.entries("group_filter"))
        edit.refuse(f"{edit.value!r}: a class path has no counterpart. Installed: {known}", "group_filters: [NAME]")


def _reserved(edit: Edit) -> None:
    edit.drop()
    edit.refuse("unknown key 'algorithm'", "write its keys at the top level")


def _generating(block: str) -> tuple[Rule, ...]:
    return (
        Rule(
            f"{block}.num_beams",
            ignore(None, 1, fix="num_beams: 1"),
            "beams have no log-probs to train on; one beam is sampling",
        ),
        Rule(f"{block}.num_return_sequences", _group_size, "the members of a group are the responses"),
        Rule(f"{block}.do_sample", _sampling, "the temperature alone says whether tokens are drawn"),
        Rule(f"{block}.top_k", _top_k, "0 switches it off"),
    )


RULES: tuple[Rule, ...] = (
    Rule("algorithm", _reserved, ""),
    # First: what ROLL writes under a role or a tag is put where the rules below look for it.
    *ROLL_RULES,
    # --- the whole run
    Rule("hydra", ignore(), "Hydra does not run here; output_dir and logging_dir say where files go"),
    Rule("checkpoint_config", _checkpoint_config, "checkpoints go to output_dir"),
    Rule("prompt_length", _lengths, "a sample holds the prompt and the response"),
    Rule("response_length", _lengths, "the response alone"),
    # Before num_return_sequences of the roles, which says the same number again and finds the groups made.
    Rule("num_return_sequences_in_group", _group_size, "the members of a group are the responses"),
    Rule("is_num_return_sequences_expand", ignore(), "there is always one request a member; the prefix cache shares the prompt"),
    Rule("reward_pretrain", ignore(), "there is no reward-model role; rewards come from the environments", free=True),
    Rule("model_name", ignore(), "the model is the one of pretrain, the run's name is exp_name", free=True),
    Rule("profiler_*", ignore(), "profiling is left to the engines' own tools"),
    Rule("data_args", ignore(), "the chat template is the model folder's; data sets are options of their environment", free=True),
    Rule("tracker_kwargs", _tracker_options, "each logger holds its own options"),
    Rule("system_envs", _role_environment, "processes belong to roles"),
    Rule("enable_old_logprobs_recompute", _recompute, "auto decides by what is needed"),
    Rule("recompute_old_logprobs", _old_logprobs, ""),
    Rule("rpc_timeout", move("runtime_timeout"), "the runtime calls the roles"),
    Rule("kl_penalty", alias(KL), "the estimator's name in the literature"),
    Rule("kl_loss_type", alias(KL), "the estimator's name in the literature"),
    Rule("reward_normalization.method", alias({"asym_clip": "mean_std"}), "the two compute the same"),
    # --- roles
    Rule("ROLE.worker_cls", ignore(), "workers are chosen by strategy_name"),
    Rule("ROLE.data_args", ignore(), "the chat template is the model folder's; data sets are options of their environment"),
    Rule("ROLE.model_args.model_type", ignore(None, "causal_lm"), "the kind of model is read from its config.json"),
    Rule("ROLE.flash_attn", move("{0}.model_args.attn_implementation"), "one key says which attention runs"),
    Rule("ROLE.model_args.flash_attn", move("{0}.model_args.attn_implementation"), "one key says which attention runs"),
    Rule("ROLE.model_args.attn_implementation", alias(ATTENTION), "the name in transformers"),
    Rule("ROLE.freeze_module_prefix", _frozen_of_role, "it is a setting of the model"),
    Rule("ROLE.model_args.freeze_module_prefix", _prefixes, ""),
    Rule("ROLE.use_remove_padding", move("{0}.use_sequence_packing"), "packing removes the padding"),
    Rule("ROLE.sequence_length_round_in_*", ignore(), "micro-batches are padded to their own longest row"),
    Rule("ROLE.model_args.ulysses_size", later(1, None, keep=False), "Ulysses sequence parallelism"),
    Rule("ROLE.ulysses_size", later(1, None, keep=False), "Ulysses sequence parallelism"),
    Rule("ROLE.system_envs", _text_values, ""),
    Rule("ROLE.device_mapping", _devices, ""),
    *_generating("ROLE.generating_args"),
    # --- environments
    Rule("MANAGER.group_size_redundancy", later(0, None, keep=False), "playing more members than train"),
    Rule("MANAGER.max_traj_per_env", ignore(), "a step plays num_env_groups × group_size episodes"),
    Rule("MANAGER.group_filter_cls", _group_filter, ""),
    *_generating("MANAGER.generating_args"),
    Rule("custom_envs.TAG.env_manager_cls", _manager_class, "managers are plugins"),
    Rule("custom_envs.TAG.agent_system_template", _to_manager, "the manager renders the prompt"),
    Rule("custom_envs.TAG.agent_runner_cls", _runner_class, "managers play the episodes, and call the tools"),
    Rule("custom_envs.TAG.tool_wrapper", ignore(None, {}, fix="remove it, or an environment that calls its own tools"), "no manager has tools yet"),
    Rule("custom_envs.TAG.agent_template", _template, "the manager renders the prompt"),
    Rule("custom_envs.TAG.pre_step_template", _template, "the manager renders the prompt"),
    Rule("custom_envs.TAG.next_step_template", _template, "the manager renders the prompt"),
    Rule("custom_envs.TAG.history_length", _to_manager, "the manager renders the prompt"),
    Rule("custom_envs.TAG.action_pattern", _to_manager, "the manager finds the action"),
    Rule("custom_envs.TAG.format_penalty", _to_manager, "the manager finds the action"),
    Rule("custom_envs.TAG.env_config.action_pattern", _to_manager, "the manager finds the action"),
    Rule("custom_envs.TAG.env_config.format_penalty", _to_manager, "the manager finds the action"),
    Rule("custom_envs.TAG.env_config.max_steps", move("custom_envs.{1}.max_steps"), "the core counts the turns"),
    Rule("custom_envs.TAG.env_config.max_actions_per_traj", move("custom_envs.{1}.max_steps"), "the core counts the turns"),
    Rule("custom_envs.TAG.max_actions_per_traj", move("custom_envs.{1}.max_steps"), "the core counts the turns"),
    Rule("custom_envs.TAG.use_thread_lock", _thread_lock, "one step at a time needs no lock"),
    Rule("max_actions_per_traj", _turns, "a turn is one action"),
    Rule("MANAGER.format_penalty", _manager_penalty, "the tag's manager finds the action"),
    # --- playing ahead
    Rule("async_generation_ratio", _ratio, "a number of batches"),
)  # fmt: skip
