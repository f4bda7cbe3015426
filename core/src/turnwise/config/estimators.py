"""What the advantage estimator asks of the run: token columns that exist before it, and somebody to compare with."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import fields_dict

from turnwise.config.problems import Report
from turnwise.config.schema import RunConfig
from turnwise.contracts.env_manager import ManagerCapabilities
from turnwise.contracts.estimator import EstimatorCapabilities
from turnwise.declared import declared, declared_if_there
from turnwise.errors import PluginError, listed
from turnwise.plugins import Registry

ALWAYS = frozenset(
    {"input_ids", "response_mask", "sample", "trajectory", "turn", "infer_log_probs", "versions", "token_level_rewards"}
    | {"old_log_probs"}
)
"""Token columns of every batch that an estimator gets."""
ITS_OWN = frozenset({"advantages", "returns"})
"""Those that an estimator makes."""


def check_estimator(config: RunConfig, registry: Registry, report: Report) -> None:
    """Columns that nothing will make, and groups in which nobody is compared."""
    known = asked(config, registry)
    name = config.adv_estimator.name
    for column in sorted(known.needs - ALWAYS) if known is not None else ():
        for why, fix in _unmade(config, registry, column):
            report.error(("adv_estimator",), f"adv_estimator {name!r} needs {why}. Fix: {fix}, or another estimator")
    _signal(config, registry, report)


def asked(config: RunConfig, registry: Registry) -> EstimatorCapabilities | None:
    """What the estimator declares; None where it cannot be asked, which is reported where it is named."""
    try:
        return declared(EstimatorCapabilities, config.adv_estimator.name, config.adv_estimator.config, registry)
    except PluginError:
        return None


def needed_columns(config: RunConfig) -> frozenset[str]:
    """The token columns that the estimator declares as needed."""
    return declared_if_there(EstimatorCapabilities, config.adv_estimator.name, config.adv_estimator.config).needs


def _unmade(config: RunConfig, registry: Registry, column: str) -> Iterator[tuple[str, str]]:
    """What a column stands for and what would bring it, if nothing in this run does."""
    if column == "values":
        if config.critic is None:
            yield "the values of a critic", "critic: {strategy_args: …, training_args: …}"
    elif column == "ref_log_probs":
        if config.init_kl_coef == 0 and config.kl_loss_coef == 0:
            yield "the log-probs of a reference", "init_kl_coef or kl_loss_coef above 0"
    elif column == "kl_penalty":
        # With `kl_in_score` the scores have it already, and no token does.
        if config.init_kl_coef == 0 or config.kl_in_score:
            yield "the KL penalty of each token", "init_kl_coef above 0, and kl_in_score: false"
    elif column in ITS_OWN:
        yield f"the column {column!r}, which estimators make", "repair the plugin"
    elif column not in (written := _of_managers(config, registry)):
        yield (
            f"the token column {column!r}, which no environment manager of the training tags writes (they write"
            f" {listed(written)})",
            "an env_manager that declares it (ManagerCapabilities.columns)",
        )


def _of_managers(config: RunConfig, registry: Registry) -> frozenset[str]:
    """Token columns that the managers of training write. A batch has a column as soon as one sample has it."""
    environments = [config.custom_envs[tag] for tag in config.train_env_manager.tags if tag in config.custom_envs]
    choices = [env.env_manager for env in environments]
    return frozenset[str]().union(
        *(declared_if_there(ManagerCapabilities, one.name, one.config, registry).columns for one in choices)
    )


def _signal(config: RunConfig, registry: Registry, report: Report) -> None:
    """A group of one has no mean but its own: estimators that compare trajectories within groups give 0."""
    if config.train_env_manager.group_size > 1:
        return
    given = config.reward_normalization
    options = config.adv_estimator.config
    stated = options is not None and "reward_normalization" in fields_dict(type(options))
    own = options.reward_normalization if stated else None
    # An estimator's own option goes before the key at the top.
    settings = own or given
    name = config.adv_estimator.name
    known = asked(config, registry)
    # None: the estimator cannot be asked, and only its settings say whether it compares.
    compares = known.compares_in_groups if known is not None else None
    grouped = bool(compares)
    if settings is not None and settings.grouping in ("batch", "tags"):
        grouped = False
    if (
        compares is not False
        and settings is not None
        and settings.method in ("mean", "mean_std")
        and settings.grouping in (None, "traj_group_id")
    ):
        grouped = True
    if grouped:
        report.warn(
            ("train_env_manager", "group_size"),
            f"group_size 1 leaves {name!r} no other trajectory to compare with. Fix: group_size: 8",
        )
