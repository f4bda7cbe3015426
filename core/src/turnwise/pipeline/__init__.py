"""The loop: roll out, score, advantage, adjust, train, sync, log; with its evaluation, checkpoints, schedules and the
local runtime."""
