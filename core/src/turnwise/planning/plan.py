"""The arithmetic of a run before it starts: batches, updates, evaluations, learning rates. No engine, no device, no
weights."""

from __future__ import annotations

import math
from typing import Any

from turnwise.config.schema import CustomEnv, Role, RunConfig
from turnwise.config.updates import data_parallel_size, rows_per_update
from turnwise.contracts.batch_adjust import AdjustContext
from turnwise.contracts.env_manager import ManagerCapabilities
from turnwise.declared import declared_if_there
from turnwise.planning import assembly, builders
from turnwise.planning.schedules import learning_rate, schedule_of

Values = dict[str, Any]
"""What `turnwise plan --json` prints: names with numbers, texts, and lists and blocks of them."""


def arithmetic(config: RunConfig) -> Values:
    """Everything that `turnwise plan` prints, as plain data. Updates of a step are a range where they depend on the
    number of turns.

    The actor's numbers stand at the top, a critic's own under `critic` (None without one). Raises what
    `batch_adjust_mode` refuses.
    """
    # Before step 0 and every eval_steps from there on.
    evaluations = math.ceil(config.max_steps / config.eval_steps) if config.eval_steps and config.val_env_manager else 0
    at_end = int(bool(evaluations and config.eval_at_end))
    episodes = sum(assembly.planned_episodes(config.val_env_manager).values()) if config.val_env_manager else 0
    return {
        **training(config, config.actor_train),
        "rollout_batch_size": config.rollout_batch_size,
        "groups": config.train_env_manager.num_env_groups,
        "group_size": config.train_env_manager.group_size,
        "rows_per_step": list(rows_per_step(config)),
        "merged": merges(config),
        "max_steps": config.max_steps,
        "trajectories": config.rollout_batch_size * config.max_steps,
        "evaluations": evaluations,
        "evaluation_trajectories": evaluations * episodes,
        "evaluations_at_end": at_end,
        "staleness": staleness(config),
        "critic": training(config, config.critic) if config.critic is not None else None,
    }


def staleness(config: RunConfig) -> Values | None:
    """How old a trained token may be, in steps, and the most groups, episodes and sampled tokens that are played ahead;
    None where nothing is."""
    ratio = config.async_generation_ratio
    if not ratio:
        return None
    # Beside the step that trains, the groups of so many more may be open.
    return {
        "steps": ratio,
        "groups": ratio * config.train_env_manager.num_env_groups,
        "episodes": ratio * config.rollout_batch_size,
        "tokens": ratio * sampled_tokens(config),
        "weight_update": config.weight_update,
    }


def sampled_tokens(config: RunConfig) -> int:
    """The most tokens that the episodes of a step may sample, by the limits of turns and lengths."""
    longest = (config.train_env_manager.generating_args or config.actor_infer.generating_args).max_new_tokens
    most = 0
    for tag, played in assembly.planned_episodes(config.train_env_manager).items():
        env = config.custom_envs[tag]
        # A manager may ask the model more than once before it acts.
        calls = env.max_steps * manager_capabilities(env).calls_per_step
        most += played * calls * min(longest, env.max_tokens_per_step or longest)
    # What is sampled stands in the rows, which are no longer than the limit.
    return min(most, rows_per_step(config)[1] * config.sequence_length)


def training(config: RunConfig, role: Role) -> Values:
    """The updates of a trained role and its learning rates. `updates_per_step`, `updates` and `warmup_updates` are
    [fewest, most]."""
    adjust = builders.build(
        "batch_adjust", config.batch_adjust_mode, AdjustContext(rows_per_update(role), config.rollout_batch_size)
    )
    # The policy's own arithmetic, for another policy counts rows in another way.
    low, high = (adjust.updates(n) * config.ppo_epochs for n in rows_per_step(config))
    schedule = schedule_of(role.training_args, config.max_steps)
    # `constant` has no warm-up, as in transformers.
    warmup = schedule.warmup_steps if schedule.name != "constant" else 0
    return {
        "data_parallel_size": data_parallel_size(role),
        "mini_batch": role.training_args.per_device_train_batch_size * data_parallel_size(role),
        "unit": rows_per_update(role),
        "updates_per_step": [low, high],
        "updates": [low * config.max_steps, high * config.max_steps],
        "warmup_steps": warmup,
        "warmup_updates": [low * warmup, high * warmup],
        "learning_rate": rates(config, role, max(1, low)),
    }


def rows_per_step(config: RunConfig) -> tuple[int, int]:
    """The fewest and the most rows of a step: one a trajectory, or one for each call up to the tag's limit of turns
    where the manager cuts so."""
    manager = config.train_env_manager
    fewest = most = 0
    for tag, groups in zip(manager.tags, manager.num_groups_partition, strict=True):
        env = config.custom_envs[tag]
        declares = manager_capabilities(env)
        # Where an episode has several roles, each of them leaves a trajectory.
        played = groups * manager.group_size * max(1, len(declares.roles))
        fewest += played
        most += played * (env.max_steps * declares.calls_per_step if declares.row_per_turn else 1)
    return fewest, most


def manager_capabilities(env: CustomEnv) -> ManagerCapabilities:
    """As the environment manager declares it; one whose packages are missing here is taken to make one row an
    episode."""
    return declared_if_there(ManagerCapabilities, env.env_manager.name, env.env_manager.config)


def merges(config: RunConfig) -> bool:
    """Whether a tag that trains joins turns into rows: a row for each turn is then the most, one for each episode the
    fewest."""
    return any(manager_capabilities(config.custom_envs[tag]).joins_turns for tag in config.train_env_manager.tags)


def rates(config: RunConfig, role: Role, per_step: int) -> dict[str, float]:
    """The learning rate of the first, the middle and the last update."""
    schedule, base, total = (
        schedule_of(role.training_args, config.max_steps),
        role.training_args.learning_rate,
        config.max_steps,
    )

    def at(p: int, k: int) -> float:
        return learning_rate(base, schedule, p, k, per_step, total)

    # The last update's rate and not that of max_steps, which no update has.
    return {"start": at(0, 0), "middle": at(total // 2, 0), "end": at(total - 1, per_step - 1)}


def warnings(config: RunConfig, plan: Values) -> list[str]:
    """What the arithmetic gives reason to warn of."""
    out = _of_the_schedule("", config, config.actor_train, plan)
    if config.critic is not None:
        out += _of_the_schedule("critic: ", config, config.critic, plan["critic"])
    if config.async_generation_ratio > 1 and config.weight_update == "between_batches":
        out.append(
            f"async_generation_ratio {config.async_generation_ratio} with weight_update between_batches: one batch is"
            " played while one is trained whatever the ratio, so more than 1 is staler and no faster. Fix: 1"
        )
    if plan["updates_per_step"][0] != plan["updates_per_step"][1]:
        out.append(
            f"batch_adjust_mode {config.batch_adjust_mode.name!r} counts rows: the number of updates depends on the"
            " turns played"
        )
    return out


def _of_the_schedule(who: str, config: RunConfig, role: Role, plan: dict[str, Any]) -> list[str]:
    out, wanted = [], schedule_of(role.training_args, config.max_steps).warmup_steps
    if plan["warmup_steps"]:
        first = "; the very first update has learning rate 0" if plan["learning_rate"]["start"] == 0 else ""
        out.append(f"{who}warmup_steps = {wanted} counts pipeline steps{first}")
    elif wanted:
        out.append(
            f"{who}warmup_steps = {wanted} has no effect with lr_scheduler_type constant. Fix: constant_with_warmup"
        )
    if not plan["learning_rate"]["end"] > 0:
        out.append(f"{who}the last update has learning rate 0: it learns nothing")
    return out


def other_meanings(config: RunConfig) -> list[str]:
    """Settings whose name or default means something else in other frameworks, as they stand here."""
    out = []
    if config.advantage_clip is not None:
        out.append(
            f"advantage_clip = {config.advantage_clip} clamps the advantages; the ratio's clip is an option of the loss"
        )
    if config.init_kl_coef == 0:
        out.append("init_kl_coef = 0: no KL penalty in the reward (ROLL's default is 0.2)")
    if config.actor_train.training_args.warmup_steps:
        out.append(
            f"warmup_steps = {config.actor_train.training_args.warmup_steps} counts pipeline steps (ROLL counts"
            " optimizer steps)"
        )
    if config.actor_train.training_args.lr_scheduler_type == "constant":
        out.append("lr_scheduler_type = constant (ROLL's default is linear)")
    if config.loss_agg_mode == "token-mean":
        out.append("loss_agg_mode = token-mean (ROLL's default is seq-mean-token-mean)")
    return out


def render(plan: Values) -> str:
    """The plan as aligned text."""
    final = " and the final one" if plan["evaluations_at_end"] else ""
    merged = ": turns whose prompts continue each other make one row" if plan["merged"] else ""
    lines = [
        ("batch", f"{plan['groups']} groups × {plan['group_size']} = {plan['rollout_batch_size']} trajectories a step"),
        ("rows", f"{_range(plan['rows_per_step'])} a step{merged}"),
        *_update_lines(plan, plan["max_steps"]),
        ("trajectories", f"{plan['trajectories']:,}"),
        ("evaluations", f"{plan['evaluations']} with {plan['evaluation_trajectories']:,} trajectories{final}"),
        *_rate_lines(plan),
    ]
    if (ahead := plan["staleness"]) is not None:
        lines.append(
            (
                "staleness",
                f"at most {ahead['steps']} step{'s' * (ahead['steps'] != 1)}; played ahead, {ahead['weight_update'].replace('_', ' ')}: at most"
                f" {ahead['groups']:,} groups, {ahead['episodes']:,} trajectories, {ahead['tokens']:,} sampled tokens",
            )
        )
    if plan["critic"] is not None:
        own = [*_update_lines(plan["critic"], plan["max_steps"]), *_rate_lines(plan["critic"])]
        lines += [("critic" if i == 0 else "", f"{name}: {text}") for i, (name, text) in enumerate(own)]
    return "\n".join(f"{name:<14} {text}" for name, text in lines)


def _update_lines(plan: dict[str, Any], steps: int) -> list[tuple[str, str]]:
    return [
        ("unit", f"U = {plan['unit']} (mini-batch {plan['mini_batch']}, data parallel {plan['data_parallel_size']})"),
        ("updates", f"{_range(plan['updates_per_step'])} a step, {_range(plan['updates'])} in {steps:,} steps"),
    ]


def _rate_lines(plan: dict[str, Any]) -> list[tuple[str, str]]:
    lr = plan["learning_rate"]
    lines = [("learning rate", f"start {lr['start']:.4g}, middle {lr['middle']:.4g}, end {lr['end']:.4g}")]
    if plan["warmup_steps"]:
        lines.append(("warm-up", f"{plan['warmup_steps']:,} pipeline steps = {_range(plan['warmup_updates'])} updates"))
    return lines


def _range(pair: list[int]) -> str:
    low, high = pair
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
