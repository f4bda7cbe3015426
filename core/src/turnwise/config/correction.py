"""The correction of trainer against sampler: bounds, and what it cannot stand beside."""

from __future__ import annotations

import math

from turnwise.config.problems import Report
from turnwise.config.schema import RunConfig
from turnwise.config.updates import loss_capabilities
from turnwise.plugins import Registry


def check_correction(config: RunConfig, registry: Registry, report: Report) -> None:
    """Bounds, and what a correction of trainer against sampler cannot stand beside."""
    correction, path = config.train_infer_correction, ("train_infer_correction",)
    if correction is None:
        return
    weight = correction.is_weight
    # Null is no bound: below that 0, above it none.
    if weight.enabled and (weight.lower_bound or 0.0) > (
        math.inf if weight.upper_bound is None else weight.upper_bound
    ):
        report.error(
            (*path, "is_weight", "lower_bound"),
            f"{weight.lower_bound} is above upper_bound {weight.upper_bound}. Fix: lower it",
        )
    for i, one in enumerate(correction.filters):
        if one.enabled and not one.active:
            report.warn((*path, "filters", i), "has no effect: neither ratio_enabled nor diff_enabled is true")
        for on, name in ((one.ratio_enabled, "ratio"), (one.diff_enabled, "diff")):
            low, high = getattr(one, f"{name}_low"), getattr(one, f"{name}_high")
            # Of a comparison that is switched off the bounds need not fit.
            if one.enabled and on and low > high:
                report.error(
                    (*path, "filters", i, f"{name}_low"),
                    f"{low} is above {name}_high {high}: no token would train. Fix: lower it",
                )
    # Compared with themselves all ratios are 1: nothing would be corrected, and nothing would say so.
    if correction.active and config.recompute_old_logprobs == "false":
        text = (
            "false: then old log-probs are the sampler's, and train_infer_correction has nothing to compare them with"
        )
        report.error(("recompute_old_logprobs",), f"{text}. Fix: recompute_old_logprobs: true")
    if weight.enabled and loss_capabilities(config, registry).needs_infer_log_probs:
        text = (
            f"true beside pg_variant {config.pg_variant.name!r}, whose own ratio is that to the sampler: it would count"
            " twice"
        )
        report.error((*path, "is_weight", "enabled"), f"{text}. Fix: is_weight: {{enabled: false}}")
