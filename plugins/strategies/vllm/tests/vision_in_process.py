"""Runs test_vllm_vision.py with vLLM in this process, though torchvision does not fit torch here: its operators are
declared before, and so in the processes that vLLM starts, which run this file anew."""

import sys

from turnwise_vllm.images import declare_torchvision

declare_torchvision()

if __name__ == "__main__":
    import pytest

    raise SystemExit(pytest.main([*sys.argv[1:], "-p", "no:cacheprovider", "-W", "ignore"]))
