"""How every distribution's tests run: property tests, tests that hang, and processes that were ended."""

from __future__ import annotations

import faulthandler
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# No test is timed, and none is too slow to draw its examples: machines are noisy, and the first text drawn in a
# fresh clone builds tables.
_slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
# derandomize is said: where CI is set, hypothesis begins with a profile of its own that draws the same each time.
settings.register_profile("explore", derandomize=False, deadline=None, suppress_health_check=_slow, max_examples=1000)
# Every run draws the same examples, and none that an earlier run left: what fails is what the change broke.
# `make fuzz` explores.
_explore = settings.get_profile("explore")
settings.register_profile("turnwise", _explore, derandomize=True, database=None, max_examples=100)
settings.load_profile("turnwise")

_terminal = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the standard error that tests are not captured from."""
    config.stash[_terminal] = os.dup(2)


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_terminal])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: dealt out last, one of them would keep one process busy while the others wait."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


# A test over its time ends its process, by a watchdog that needs neither the interpreter nor the loop; xdist starts
# another process for the tests left. An error that a signal raises, pytest-timeout's way, is swallowed by the tasks and
# threads that hang, and the suite hangs with them.
@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Print where every thread hangs, and end the process."""
    faulthandler.dump_traceback_later(settings.timeout, exit=True, file=item.config.stash[_terminal])
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    """The test has ended."""
    faulthandler.cancel_dump_traceback_later()
    return True


def pytest_enter_pdb() -> None:
    """Somebody looks at the test."""
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadfile`, xdist's own scheduler but for one thing: it would give the test that ended a process to
    the next one, and so end them all."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Once(LoadFileScheduling):
        def remove_node(self, node: Any) -> str | None:
            """The test that the process was at, which has failed; those left are dealt anew."""
            units = self.assigned_work[node].values()
            left = [(unit, test) for unit in units for test, done in unit.items() if not done]
            for unit, test in left[:1]:
                unit[test] = True
            super().remove_node(node)
            return left[0][1] if left else None

    return Once(config, log)
