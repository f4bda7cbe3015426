"""Puts this folder's fakes on the import path (the suite runs in importlib mode)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
