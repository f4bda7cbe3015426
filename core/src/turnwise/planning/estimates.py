"""What a run will need, estimated: tokens, memory per role and phase, disk, time. Arithmetic on the configuration and a
model's facts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from turnwise.config.schema import Choice, Role, RunConfig
from turnwise.config.updates import rows_per_update, strategy_capabilities, token_budget
from turnwise.contracts.batch_adjust import AdjustContext
from turnwise.data.numbers import BYTES
from turnwise.errors import ConfigError, PluginError
from turnwise.planning import cpu, transport
from turnwise.planning.assembly import (
    backend_capabilities,
    build,
    is_its_own_reference,
    needs_reference,
    role_of,
)
from turnwise.planning.facts import ModelFacts, find_config, read_facts
from turnwise.planning.plan import Values, rows_per_step, sampled_tokens
from turnwise.plugins import registry

DEVICE_GB = 40
"""Memory of a device where nobody says."""
# That of turnwise_torch.head, which the core may not import.
LOGITS_CHUNK = 2**26
"""Logits of a chunk, in fp32."""
LOGITS_COPIES = {True: 6, False: 2}
"""Tensors as large as a chunk's logits at a time, with gradients and without, as benchmarks/memory.py measured them."""
CPU_BYTES_PER_TOKEN = {"rollout": 17, "log_probs": 4, "advantages": 8}
"""Id, mask, turn, log-prob and version of a token of the batch; its log-prob (or value) by each model; its advantage and return."""
DUMP_BYTES = {"prompt": 6, "sampled": 36}
"""A token in the JSON of a dumped trajectory: its id; for a sampled one also mask, log-prob and version."""
PARTS = ("weights", "gradients", "optimizer", "activations", "kv_cache")
"""What counts in a total."""
FULL = 0.9
"""Share of a device past which an estimate is reported: allocators and engines need the rest."""


def estimates(config: RunConfig, base: Path, *, device_gb: float = DEVICE_GB, earlier: Path | None = None) -> Values:
    """Everything estimated, as plain data. `memory` and what depends on it are None where the model's facts are not
    known.

    `earlier`: the output folder of a run, whose phase times give `time` (None without it). Raises ConfigError for one
    without metrics."""
    path = find_config(config.pretrain, base)
    facts = read_facts(path) if path is not None else None
    tokens = tokens_per_step(config)
    batch = main_memory(config, facts, tokens["trained"])
    lines = memory(config, facts, int(device_gb * 1e9)) if facts is not None else None
    return {
        "model": {"config": str(path), "parameters": facts.parameters} if facts is not None else None,
        "updates_by_policy": updates_by_policy(config),
        "tokens_per_step": tokens,
        "device_gb": device_gb,
        "memory": lines,
        "cpu": batch,
        "one_process": cpu.peak(config, lines, batch) if lines is not None else None,
        "disk": disk(config, facts, tokens),
        "copied": copied(config, facts),
        "time": times(config, earlier) if earlier is not None else None,
    }


def cpu_warnings(config: RunConfig, base: Path) -> list[str]:
    """Those of `warnings` that this machine's main memory gives reason for."""
    path = find_config(config.pretrain, base)
    facts = read_facts(path) if path is not None else None
    if facts is None:
        return []
    batch = main_memory(config, facts, tokens_per_step(config)["trained"])
    return cpu.warning(config, cpu.peak(config, memory(config, facts, int(DEVICE_GB * 1e9)), batch))


def tokens_per_step(config: RunConfig) -> dict[str, int]:
    """The most tokens of a step: `sampled`, and `trained` (prompts and observations included), by the limits of turns
    and lengths."""
    # The most that the limits allow: how long episodes get is known only when they are played.
    return {"sampled": sampled_tokens(config), "trained": rows_per_step(config)[1] * config.sequence_length}


def main_memory(config: RunConfig, facts: ModelFacts | None, tokens: int) -> dict[str, int]:
    """Bytes of the batch in main memory by what they hold, at most; `images` of a model that reads them, as if every
    token were of one."""
    models = 1 + needs_reference(config) + (config.critic is not None)
    out = {name: width * tokens for name, width in CPU_BYTES_PER_TOKEN.items()}
    # The actor's, the reference's and the critic's values: a column each.
    out["log_probs"] *= models
    if facts is not None and facts.image is not None:
        out["images"] = facts.image.pixel_bytes * tokens
    # What is played ahead is kept until its step comes: log-probs and advantages are computed then.
    for name in ("rollout", "images"):
        if name in out:
            out[name] *= 1 + config.async_generation_ratio
    return out


def copied(config: RunConfig, facts: ModelFacts | None) -> int | None:
    """Bytes of the weights that the sampler has of its own where it would share the trainer's, were nothing played
    ahead; None where it would not, or the model is not known."""
    if facts is None or not config.async_generation_ratio:
        return None
    try:
        shared = transport.choose(evolve(config, async_generation_ratio=0)) == "shared"
    except (ConfigError, PluginError):
        return None
    return facts.parameters * BYTES[config.actor_infer.model_args.dtype] if shared else None


def updates_by_policy(config: RunConfig) -> dict[str, list[int]]:
    """Updates of a step under every installed batch-adjust policy: with the fewest and with the most rows that the
    turns may give."""
    context = AdjustContext(rows_per_update(config.actor_train), config.rollout_batch_size)
    out = {}
    for entry in registry().entries("batch_adjust"):
        try:
            policy = build("batch_adjust", Choice(entry.name), context)
        except (PluginError, TypeError, ValueError):  # one that is broken, or needs options of its own
            continue
        out[entry.name] = [policy.updates(rows) * config.ppo_epochs for rows in rows_per_step(config)]
    return out


def memory(config: RunConfig, facts: ModelFacts, device: int) -> list[Values]:
    """Bytes on one device by role and phase, in the order in which the roles run; `cpu`: bytes that it keeps in main
    memory instead.

    `images`, of a model that reads them and not in the total: the most that pictures and their tower add, as if every
    token were of one.
    """
    out: list[dict[str, Any]] = [{"role": "actor_infer", "phase": "sampling", **_sampling(config, facts, device)}]
    trained = {"actor_train": True, "critic": True, "reference": False}
    for name in ("reference", "actor_train", "critic"):
        if (name == "reference" and (not needs_reference(config) or is_its_own_reference(config))) or (
            name == "critic" and config.critic is None
        ):
            continue
        # A reference computes log-probs alone: no gradients, no optimizer.
        phase = "training" if trained[name] else "log-probs"
        out.append({"role": name, "phase": phase, **role_memory(config, role_of(config, name), facts, trained[name])})
    for line in out:
        # Without `images`, which are an upper bound that hardly any batch reaches, and without what lies in main
        # memory.
        line["total"] = total(line)
    return out


def total(line: Mapping[str, Any]) -> int:  # Any: a line of the plan
    """The bytes that a role's parts come to."""
    return sum(line.get(part, 0) for part in PARTS)


def _sampling(config: RunConfig, facts: ModelFacts, device: int) -> dict[str, int]:
    """As the backend's config class counts; else the weights and a full cache of all episodes that play at once."""
    role = config.actor_infer
    dtype = role.model_args.dtype
    if (count := backend_capabilities(config).memory) is not None:
        return dict(count({"parameters": facts.parameters, "dtype": dtype, "device_bytes": device}))
    # Each episode that plays has one request under way at most.
    alive = min(config.rollout_batch_size, config.train_env_manager.max_env_num_per_worker or config.rollout_batch_size)
    return {
        "weights": facts.parameters * BYTES[dtype],
        "kv_cache": alive * config.sequence_length * facts.kv_bytes(dtype),
    }


def role_memory(config: RunConfig, role: Role, facts: ModelFacts, trainable: bool) -> dict[str, int]:
    """Bytes of a training role on one device by what they hold, as the strategy's config class counts, with the
    activations of the largest micro-batch."""
    dtype = role.model_args.dtype
    rows = (
        role.training_args.per_device_train_batch_size
        if trainable
        else role.infer_batch_size or role.training_args.per_device_train_batch_size
    )
    budget = token_budget(config, role, "train" if trainable else "infer")
    tokens = budget if budget is not None else rows * config.sequence_length
    logits = 4 * LOGITS_COPIES[trainable] * min(LOGITS_CHUNK, tokens * facts.vocabulary)
    # Every row of a micro-batch has scores of its own, where they are written out.
    eager = role.model_args.attn_implementation == "eager"
    scores = math.ceil(tokens / config.sequence_length) * config.sequence_length**2 if eager else 0
    kept = facts.activation_bytes(tokens, dtype, kept=True, scores=scores)
    recomputed = facts.activation_bytes(tokens, dtype, kept=False, scores=scores)
    if not trainable:
        kept = recomputed = kept // facts.layers
    wanted = kept if role.model_args.disable_gradient_checkpointing else recomputed
    asked = {
        "parameters": facts.parameters,
        "dtype": dtype,
        "trainable": trainable,
        "world": max(1, len(role.device_mapping)),
        "activations": recomputed,
        "activations_kept": kept,
    }
    count = strategy_capabilities(role).memory
    held: dict[str, int] = dict(count(asked)) if count is not None else {"weights": facts.parameters * BYTES[dtype]}
    out = {**held, "activations": held.get("activations", wanted) + logits}
    if facts.image is not None:
        kept_all = role.model_args.disable_gradient_checkpointing
        out["images"] = facts.image.device_bytes(tokens, dtype, trainable=trainable, kept=kept_all)
    return out


def disk(config: RunConfig, facts: ModelFacts | None, tokens: Mapping[str, int]) -> dict[str, int | None]:
    """Bytes of a checkpoint (fp32 masters and two moments of each trained role, and the export) and, at most, of a
    step's dump."""
    checkpoint = None
    if facts is not None:
        trained = 2 if config.critic is not None else 1
        # fp32, 4 bytes each.
        checkpoint = trained * 12 * facts.parameters + BYTES[config.actor_train.model_args.dtype] * facts.parameters
    prompts = max(0, tokens["trained"] - tokens["sampled"])
    return {
        "checkpoint": checkpoint,
        "dumped_step": DUMP_BYTES["prompt"] * prompts + DUMP_BYTES["sampled"] * tokens["sampled"],
    }


def times(config: RunConfig, earlier: Path) -> Values:
    """Seconds by phase, averaged over an earlier run's steps, and the total that they give for this one. Raises
    ConfigError without metrics."""
    path = earlier if earlier.is_file() else earlier / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        steps = [line for line in lines if "time/step" in line]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--from {earlier}: {path} cannot be read ({error}). Fix: the output_dir of a run that was tracked with"
            " jsonl."
        ) from error
    if not steps:
        raise ConfigError(
            f"--from {earlier}: {path} holds no time/step. Fix: the output_dir of a run that finished a step."
        )
    # What is idle, and `publish`, are other phases by another name.
    apart = {"step", "eval", "save", "trainer_idle", "sampler_idle", "publish"}
    # Evaluations and saves come at a rhythm of their own, and `step` would count the other phases twice.
    names = sorted({key.removeprefix("time/") for line in steps for key in line if key.startswith("time/")} - apart)
    phases = {name: sum(line.get(f"time/{name}") or 0.0 for line in steps) / len(steps) for name in names}
    played = [line["time/eval"] for line in lines if line.get("time/eval")]
    saved = [line["time/save"] for line in lines if line.get("time/save")]
    evaluations = (
        math.ceil(config.max_steps / config.eval_steps) + config.eval_at_end
        if config.eval_steps and config.val_env_manager
        else 0
    )
    # One at the end in any case, and none twice where save_steps divides max_steps.
    saves = 1 + ((config.max_steps - 1) // config.save_steps if config.save_steps else 0)
    one_evaluation, one_save = (sum(x) / len(x) if x else 0.0 for x in (played, saved))
    summed, rollout = sum(phases.values()), phases.get("rollout", 0.0)
    # Played ahead, a step takes as long as the slower side. A run that did so itself measured that already.
    ahead = config.async_generation_ratio > 0 and not any("time/trainer_idle" in line for line in steps)
    a_step = max(rollout, summed - rollout) if ahead else summed
    return {
        "phases": phases,
        "one_after_the_other": summed if ahead else None,
        "step": a_step,
        "evaluation": one_evaluation,
        "save": one_save,
        "total": config.max_steps * a_step + evaluations * one_evaluation + saves * one_save,
    }


def warnings(values: Values, config: RunConfig) -> list[str]:
    """What does not fit a device, or the main memory of a machine that has none, with the keys to lower."""
    out = cpu.warning(config, values["one_process"])
    for line in values["memory"] or ():
        role = role_of(config, line["role"])
        # A sampler fills its device by design; a role without numbers may be on a CPU.
        if not role.device_mapping or line["total"] <= FULL * values["device_gb"] * 1e9 or line["phase"] == "sampling":
            continue
        rows = role.training_args.per_device_train_batch_size
        lower = (
            f"lower per_device_train_batch_size ({rows}; raise gradient_accumulation_steps) or sequence_length"
            f" ({config.sequence_length})"
        )
        out.append(
            f"{line['role']}: about {line['total'] / 1e9:.0f} GB in {line['phase']} is too much for a device of"
            f" {values['device_gb']:g} GB. Fix: {lower}, shard or offload"
        )
    sampling = next((line for line in values["memory"] or () if line["phase"] == "sampling"), None)
    if sampling is not None and sampling.get("kv_cache") == 0:
        out.append(
            f"actor_infer: the weights leave no room for a KV cache on a device of {values['device_gb']:g} GB. Fix:"
            " more tensor parallelism"
        )
    return out


def render(values: Values) -> str:
    """The estimates as aligned text."""
    tokens = values["tokens_per_step"]
    lines = []
    # Where turns are rows.
    if any(low != high for low, high in values["updates_by_policy"].values()):
        spread = ", ".join(
            f"{name} {low:,}" + (f" to {high:,}" if low != high else "")
            for name, (low, high) in values["updates_by_policy"].items()
        )
        lines.append(("by policy", f"updates a step: {spread}"))
    lines.append(("tokens", f"at most {tokens['sampled']:,} sampled and {tokens['trained']:,} trained a step"))
    if values["model"] is None:
        lines.append(("memory", "unknown: no config.json of the model that is counted here"))
    else:
        lines.append(
            ("model", f"{values['model']['parameters'] / 1e9:.3g} billion parameters ({values['model']['config']})")
        )
        lines += [("memory" if i == 0 else "", _memory_line(line)) for i, line in enumerate(values["memory"])]
    if values["copied"] is not None:
        lines.append(
            ("", f"actor_infer: {_bytes(values['copied'])} are a copy of the weights, which playing ahead needs")
        )
    whole = values["one_process"]
    total_ = (
        f"; of the whole run about {_bytes(whole['total'])}, in {whole['phase']} of {whole['role']}" if whole else ""
    )
    batch = ", ".join(f"{name} {_bytes(size)}" for name, size in values["cpu"].items())
    lines.append(("main memory", f"{batch}, at most{total_}"))
    disk_ = values["disk"]
    size = "unknown" if disk_["checkpoint"] is None else _bytes(disk_["checkpoint"])
    lines.append(("disk", f"checkpoint {size}, dumped step at most {_bytes(disk_['dumped_step'])}"))
    if values["time"] is not None:
        spent = values["time"]
        phases = ", ".join(f"{name} {seconds:.2g}" for name, seconds in spent["phases"].items())
        lines.append(
            (
                "time",
                (
                    f"{_duration(spent['total'])}; a step {spent['step']:.3g} s{_slower(spent)} ({phases}), an evaluation"
                    f" {spent['evaluation']:.3g} s"
                ),
            )
        )
    return "\n".join(f"{name:<14} {text}" for name, text in lines)


def _slower(spent: Mapping[str, Any]) -> str:
    together = spent["one_after_the_other"]
    return (
        f", the slower of rollout and training ({together:.3g} s one after the other)" if together is not None else ""
    )


def _memory_line(line: Mapping[str, Any]) -> str:
    parts = " + ".join(f"{name.replace('_', ' ')} {_bytes(line[name])}" for name in PARTS if line.get(name))
    offloaded = f", {_bytes(line['cpu'])} in main memory" if line.get("cpu") else ""
    images = f", images at most {_bytes(line['images'])} more" if line.get("images") else ""
    return f"{line['role']}, {line['phase']}: {_bytes(line['total'])} a device ({parts}){images}{offloaded}"


def _bytes(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
