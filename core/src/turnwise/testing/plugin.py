"""The fakes as a plugin: `plugins: [turnwise.testing.plugin]` makes them answer to `fake`, or to the names below."""

from turnwise.hookspecs import Implementation, hookimpl


@hookimpl
def environments() -> list[Implementation]:
    """The counting game, and one of pictures."""
    return [
        Implementation(
            "fake_env",
            "turnwise.testing.fakes:FakeEnvironment",
            aliases=("fake",),
            summary="a counting game that can fail in every way",
        ),
        Implementation("fake_lamp", "turnwise.testing.fake_lamp:FakeLamp", summary="pictures that are lit on one side"),
    ]


@hookimpl
def env_managers() -> list[Implementation]:
    """One sample per trajectory."""
    return [
        Implementation(
            "fake_manager",
            "turnwise.testing.fakes:FakeEnvManager",
            aliases=("fake",),
            summary="a dialogue without templates",
        )
    ]


@hookimpl
def inference_backends() -> list[Implementation]:
    """The bigram's sampler."""
    return [
        Implementation(
            "fake_backend",
            "turnwise.testing.fakes:FakeBackend",
            config="turnwise.testing.fakes:FakeBackendConfig",
            aliases=("fake",),
            summary="samples from a softmax bigram",
            fixtures="turnwise.testing.fixtures:backend",
        )
    ]


@hookimpl
def train_strategies() -> list[Implementation]:
    """The bigram's trainer."""
    return [
        Implementation(
            "fake_strategy",
            "turnwise.testing.fakes:FakeStrategy",
            aliases=("fake",),
            summary="plain gradient steps on a softmax bigram",
            fixtures="turnwise.testing.fixtures:strategy",
        )
    ]


@hookimpl
def advantage_estimators() -> list[Implementation]:
    """Score minus group mean."""
    return [
        Implementation(
            "fake_estimator",
            "turnwise.testing.fakes:FakeEstimator",
            aliases=("fake",),
            summary="score minus the mean of its group",
        )
    ]


@hookimpl
def policy_losses() -> list[Implementation]:
    """The policy gradient under a ratio."""
    return [
        Implementation(
            "fake_loss",
            "turnwise.testing.fakes:FakeLoss",
            aliases=("fake",),
            summary="minus advantage times ratio, to the second order",
        )
    ]


@hookimpl
def batch_adjusts() -> list[Implementation]:
    """Nearly equal parts."""
    return [
        Implementation(
            "fake_adjust",
            "turnwise.testing.fakes:FakeBatchAdjust",
            aliases=("fake",),
            summary="nearly equal parts of shuffled rows",
        )
    ]


@hookimpl
def group_filters() -> list[Implementation]:
    """Everything, or the odd groups."""
    return [
        Implementation(
            "fake_filter",
            "turnwise.testing.fakes:FakeGroupFilter",
            config="turnwise.testing.fakes:FakeFilterConfig",
            aliases=("fake",),
            summary="keeps every group, or the odd ones",
        )
    ]


@hookimpl
def loggers() -> list[Implementation]:
    """A logger that remembers."""
    return [
        Implementation(
            "fake_logger",
            "turnwise.testing.fakes:FakeLogger",
            config="turnwise.testing.fakes:FakeLoggerConfig",
            aliases=("fake",),
            summary="remembers what it was given, or fails when asked to",
        )
    ]


@hookimpl
def runtimes() -> list[Implementation]:
    """Everything in one thread."""
    return [
        Implementation(
            "fake_runtime",
            "turnwise.testing.fake_runtime:FakeRuntime",
            config="turnwise.testing.fake_runtime:FakeRuntimeConfig",
            aliases=("fake",),
            summary="every role in one thread",
        )
    ]


@hookimpl
def model_sources() -> list[Implementation]:
    """A bigram in a folder."""
    return [
        Implementation(
            "fake_source",
            "turnwise.testing.fakes:FakeModelSource",
            aliases=("fake",),
            summary="a bigram over characters",
            fixtures="turnwise.testing.fixtures:source",
        )
    ]
