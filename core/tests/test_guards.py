"""One run at a time in an output folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.errors import MachineError
from turnwise.pipeline.guards import alone_in

HOLD = """
import sys, time
from pathlib import Path
from turnwise.pipeline.guards import alone_in

with alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_has_ended_however_it_ends(tmp_path: Path) -> None:
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with (
            pytest.raises(MachineError, match=r"another run is writing into .* Fix: wait for its end, or choose another output_dir"),
            alone_in(tmp_path),
        ):
            pass
    finally:
        first.kill()
        first.communicate()
    with alone_in(tmp_path):
        pass
    with alone_in(tmp_path):  # and it is free again afterwards
        pass
