"""The public parts of which an environment manager is made; `trajectory` and `stepwise` are made of them, too.

```python
world = await World(episode).begin()                     # the environment's side
line = Line(world, sampler, rules, Growing())            # one model's side: its conversation becomes a trajectory
while world.going:
    line.show()                                          # the observation, with the templates around it
    if not await line.ask():                             # one call; False: no room for another token
        break
    await line.act()                                     # the action in the response, to the environment
return line.trajectory()
```

Several calls a turn: `show` words of your own and `ask` again before `act`. Several trajectories: a line for each role,
all of one world, and a list of their trajectories. Another model: a line with a sampler of `episode.samplers`. `play`
is the loop above.
"""

from __future__ import annotations

from turnwise.contracts.env_manager import Episode, Sampler
from turnwise.data.trajectory import Trajectory
from turnwise_managers.config import ManagerConfig
from turnwise_managers.line import Line, Prompt, Prompts
from turnwise_managers.patterns import ActionFinder, without_thinking
from turnwise_managers.prompts import Anew, Growing
from turnwise_managers.rules import Rules
from turnwise_managers.samples import merged, one_row, row_per_call
from turnwise_managers.templates import PLACEHOLDERS, Template, parse_template
from turnwise_managers.world import World

__all__ = [
    "PLACEHOLDERS",
    "ActionFinder",
    "Anew",
    "Growing",
    "Line",
    "ManagerConfig",
    "Prompt",
    "Prompts",
    "Rules",
    "Template",
    "World",
    "merged",
    "one_row",
    "parse_template",
    "play",
    "row_per_call",
    "without_thinking",
]


async def play(episode: Episode, sampler: Sampler, rules: Rules, prompts: Prompts) -> Trajectory:
    """Play an episode with one call a turn. Raises EngineError, EnvironmentFailure, and ConfigError for what the
    prompts cannot show."""
    world = await World(episode).begin()
    line = Line(world, sampler, rules, prompts)
    while world.going:
        line.show()
        if not await line.ask():
            break
        await line.act()
    return line.trajectory()
