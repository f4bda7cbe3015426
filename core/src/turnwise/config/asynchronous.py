"""What `async_generation_ratio` over 0 asks of the other keys: old log-probs of the trainer, and a correction by
importance weights."""

from __future__ import annotations

from attrs import evolve

from turnwise.config.problems import Report
from turnwise.config.schema import RunConfig, TrainInferCorrection
from turnwise.config.updates import loss_capabilities
from turnwise.contracts.inference import BackendCapabilities
from turnwise.declared import declared
from turnwise.errors import PluginError
from turnwise.plugins import Registry

LARGEST_WEIGHT = 2.0
"""C of the weight min(C, π_prox/μ) where the file says nothing."""


def check_stalls(config: RunConfig, report: Report) -> RunConfig:
    """Nothing moves while one call takes its time: the timeout of all is above those of the calls."""
    managers = [manager for manager in (config.train_env_manager, config.val_env_manager) if manager is not None]
    calls = {("actor_infer", "request_timeout"): config.actor_infer.request_timeout} | {
        (block, key): getattr(manager, key)
        for block, manager in zip(("train_env_manager", "val_env_manager"), managers)
        for key in ("step_timeout", "reset_timeout")
    }
    path, longest = max(calls.items(), key=lambda item: item[1])
    if config.stall_timeout > longest:
        return config
    if report.sources.wrote(("stall_timeout",)):
        text = (
            f"{config.stall_timeout:g} is not above {'.'.join(path)} {longest:g}, for which one call may move nothing"
        )
        report.error(("stall_timeout",), f"{text}. Fix: raise it, or lower the other")
    # Longer by half: a call that takes all of its time ends, and is retried or reported, before everything is given up.
    return evolve(config, stall_timeout=1.5 * longest)


def check_asynchronous(config: RunConfig, registry: Registry, report: Report) -> RunConfig:
    """Report what cannot stand beside the ratio, and return the configuration with the correction that it needs."""
    ratio = config.async_generation_ratio
    if not ratio:
        if config.weight_update != "between_batches":
            report.warn(("weight_update",), "has no effect: async_generation_ratio is 0")
        return config
    _update(config, registry, report)
    if config.recompute_old_logprobs == "false":
        text = (
            f"false beside async_generation_ratio {ratio}: then old log-probs are those of earlier weights, and nothing"
            " corrects for their age"
        )
        report.error(("recompute_old_logprobs",), f"{text}. Fix: remove the key, or async_generation_ratio: 0")
        # The correction stays off: it would only bring a second line about the same key.
        return config
    return _corrected(config, registry, report)


def _update(config: RunConfig, registry: Registry, report: Report) -> None:
    """Responses are cut through by a backend that says so alone."""
    when, choice = config.weight_update, config.actor_infer.strategy_args
    if when != "between_tokens" or choice is None:
        return
    try:
        sampler = declared(BackendCapabilities, choice.name, choice.config, registry)
    except PluginError:  # reported where it is named
        return
    if not sampler.updates_between_tokens:
        text = f"{when} is not there for the backend {choice.name!r} in this version"
        report.error(("weight_update",), f"{text}. Fix: weight_update: between_batches, or between_turns")


def _corrected(config: RunConfig, registry: Registry, report: Report) -> RunConfig:
    """Tokens of earlier weights are weighted with π_prox/μ unless the file decides otherwise."""
    ratio, path = config.async_generation_ratio, ("train_infer_correction",)
    if loss_capabilities(config, registry).needs_infer_log_probs:  # the loss corrects by its own ratio
        return config
    correction = config.train_infer_correction
    if correction is None and report.sources.wrote(path):
        report.warn(
            path,
            f"null beside async_generation_ratio {ratio}: nothing corrects for the age of the tokens. Fix: remove the"
            " key, for weights at token level of at most 2",
        )
        return config
    given = correction or TrainInferCorrection()
    weight = given.is_weight
    if weight.enabled:
        return config
    if report.sources.wrote((*path, "is_weight", "enabled")):
        report.warn(
            (*path, "is_weight", "enabled"),
            f"false beside async_generation_ratio {ratio}: filters alone do not correct for the age of the tokens. Fix:"
            " true",
        )
        return config
    # The default of the key bounds what two engines differ by; weights that are older differ by more.
    if not report.sources.wrote((*path, "is_weight", "upper_bound")):
        weight = evolve(weight, upper_bound=LARGEST_WEIGHT)
    report.note(
        ("async_generation_ratio",),
        f"{ratio} switches train_infer_correction.is_weight on: {{enabled: true, weight_type: {weight.weight_type},"
        f" upper_bound: {weight.upper_bound}}} (train_infer_correction: null switches it off)",
    )
    return evolve(config, train_infer_correction=evolve(given, is_weight=evolve(weight, enabled=True)))
