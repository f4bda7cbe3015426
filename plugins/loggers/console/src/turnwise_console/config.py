"""The options of the console logger."""

from attrs import frozen

DEFAULT_KEYS = (
    "critic/score/mean",
    "env/*/success",
    "policy/loss",
    "policy/entropy",
    "policy/approx_kl",
    "policy/kl",
    "policy/learning_rate",
    "time/rollout",
    "time/actor_train",
    "time/step",
    "time/trainer_idle",
    "time/sampler_idle",
    "val/*/success",
    "val/*/score/mean",
)


@frozen
class ConsoleConfig:
    """`keys`: the metrics to show, in this order; `*` in a name stands for a tag, and names under `val/` go to the line
    of an evaluation. Of a name that ends in `_idle` the share of the step is shown. `progress`: draw a progress bar where
    the output is a terminal."""

    keys: tuple[str, ...] = DEFAULT_KEYS
    progress: bool = True
