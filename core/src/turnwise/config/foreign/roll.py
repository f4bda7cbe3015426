"""Keys that ROLL's files of 2026 brought: losses under a role, FSDP2's options, what its workers, runners and sandboxes
read."""

from __future__ import annotations

import attrs

from turnwise.config.foreign.translate import Edit, Rule, ignore
from turnwise.config.foreign.verifiable import rewards
from turnwise.config.problems import at
from turnwise.config.schema import Role, RunConfig
from turnwise.errors import PluginError

_KERNELS = (
    "a patch of ROLL's own model code; memory is bounded by micro-batches, gradient checkpointing and logits_chunk here"
)
_PLAIN = "log-probs are those of the plain distribution"
_FOLDED = "layers, embeddings and master weights are sharded one way here; model_args.dtype is the compute type"


def _loss_of_role(edit: Edit) -> None:
    """`pg_variant` and options of losses under actor_train are those of the run."""
    key = edit.path[-1]
    if key not in {a.name for a in attrs.fields(Role)} and (key == "pg_variant" or key in _loss_options(edit)):
        edit.drop()
        if edit.put((key,), edit.value):
            edit.note(f"is $.{key} here")


def _loss_options(edit: Edit) -> set[str]:
    found = {a.name for a in attrs.fields(RunConfig)} - {"pretrain", "seed", "system_envs"}
    for entry in edit.registry.entries("policy_loss"):
        try:
            options = entry.config_class()
        except PluginError:  # reported where it is named
            continue
        found |= {a.name for a in attrs.fields(options)} if options is not None else set()
    return found


def _rank(edit: Edit) -> None:
    # By type: False is 0 to Python, and a mistake that the conversion reports.
    if type(edit.value) is int and edit.value == 0:
        at(edit.data, edit.path[:-1])["lora_rank"] = None
        edit.note("0 is lora_rank: null here, full training")


def _offload(edit: Edit) -> None:
    """FSDP2's offload of everything, true or false."""
    edit.drop()
    if edit.value not in (None, False) and edit.put((*edit.path[:-1], "fsdp", "cpu_offload"), edit.value):
        edit.note("is fsdp: {cpu_offload: …} here")


def _reshard(edit: Edit) -> None:
    if str(at(edit.data, (edit.path[0], "strategy_args", "strategy_name"))).startswith("fsdp2"):
        edit.drop()
        if edit.put((*edit.path[:-1], "fsdp", "reshard_after_forward"), edit.value):
            edit.note("is fsdp: {reshard_after_forward: …} here")


def _render_mode(edit: Edit) -> None:
    """Text is what there is; pictures where the environment has the option."""
    tag = edit.path[1]
    try:
        entry = edit.registry.find("environment", str(edit.get("custom_envs", tag, "env_type")))
        edit.registry.check_options(entry, {"render_mode": edit.value})
    except PluginError as error:
        if "render_mode" not in str(error):
            return  # reported elsewhere, or not installed
        edit.drop()
        if edit.value in (None, "text"):
            edit.report.warn(edit.path, f"does not apply: {edit.why}")
        else:
            name = edit.get("custom_envs", tag, "env_type")
            edit.refuse(f"{edit.value!r}: environment {name!r} has no pictures", "remove the key to play on text")


def _same_process(edit: Edit) -> None:
    """Variables of ROLL's environment workers."""
    edit.drop()
    if edit.value:
        edit.report.warn(edit.path, f"does not apply: {edit.why}. Fix: export them")


def _proxy(edit: Edit) -> None:
    edit.drop()
    kind = edit.value.get("proxy_type", "policy") if isinstance(edit.value, dict) else edit.value
    if kind in (None, "policy"):
        edit.report.warn(edit.path, f"does not apply: {edit.why}")
    else:
        edit.refuse(
            f"a proxy of type {kind!r} has no counterpart",
            "remove the key; $.custom_envs.TAG.samplers names further models",
        )


def _not_agentic(edit: Edit) -> None:
    edit.drop()
    edit.refuse(
        f"{edit.path[-1]} belongs to another pipeline than the agentic one: {edit.why}",
        "custom_envs and val_env_manager",
    )


def _per_role(key: str, *rule: object) -> tuple[Rule, ...]:
    """A rule for a key that stands beside the model's settings, the strategy's, or the role's own."""
    places = ("ROLE", "ROLE.model_args", "ROLE.strategy_args.strategy_config")
    return tuple(Rule(f"{place}.{key}", *rule) for place in places)  # type: ignore[arg-type]


ROLL_RULES: tuple[Rule, ...] = (
    Rule("actor_train.*", _loss_of_role, "the loss is chosen once for the run"),
    *(rule for key in ("apply_tiled_mlp", "tiled_num_shards", "moe_experts", "apply_expert_patch") for rule in _per_role(key, ignore(), _KERNELS)),
    *(Rule(f"ROLE.strategy_args.strategy_config.{key}", ignore(), _FOLDED) for key in ("param_dtype", "reduce_dtype", "wrap_policy")),
    Rule("ROLE.strategy_args.strategy_config.fsdp_size", ignore(), "a model is sharded over the devices of its role"),
    Rule("ROLE.strategy_args.strategy_config.offload_policy", _offload, ""),
    Rule("ROLE.strategy_args.strategy_config.reshard_after_forward", _reshard, ""),
    Rule("ROLE.model_args.lora_rank", _rank, ""),
    Rule("ROLE.model_args.lora_dropout", ignore(None, 0, 0.0, fix="remove it"), "adapters train without dropout"),
    Rule("ROLE.training_args.bf16", ignore(), "model_args.dtype is the compute type"),
    Rule("ROLE.training_args.max_steps", ignore(), "max_steps of the run says how long it is"),
    Rule("ROLE.training_args.num_train_epochs", ignore(), "max_steps of the run says how long it is"),
    *(Rule(f"{of}.generating_args.repetition_penalty", ignore(None, 1, 1.0, fix="repetition_penalty: 1"), _PLAIN) for of in ("ROLE", "MANAGER")),
    Rule("ROLE.num_gpus_per_worker", ignore(), "the strategy's parallel sizes say how many devices an engine has"),
    Rule("ROLE.model_update_frequency", ignore(None, 1, fix="model_update_frequency: 1"), "the sampler gets the weights of every step"),
    Rule("enable_reference", ignore(), "a reference is loaded where a KL coefficient is positive"),
    Rule("num_nodes", ignore(), "the devices of the roles say what is used"),
    Rule("transfer_backend", ignore(), "weights take the transport that trainer and sampler have in common"),
    Rule("parse_tool_call_parameter_to_dict", ignore(), "the chat template gets messages as the environment gives them"),
    Rule("skip_mock_system_prompt", ignore(), "no system message is made up where none is given"),
    Rule("agent_runner_cls", ignore(), "managers play the episodes", free=True),
    Rule("env_manager_cls", ignore(), "each tag names its manager", free=True),
    Rule("rewards", rewards, "rewards come from the environments"),
    Rule("validation", _not_agentic, "evaluation plays environments"),
    Rule("MANAGER.system_envs", _same_process, "environments inherit the variables of the process that starts the run"),
    Rule("MANAGER.llm_proxy", _proxy, "the manager asks the sampler itself"),
    Rule("custom_envs.TAG.env_config.render_mode", _render_mode, "observations are text"),
)  # fmt: skip
