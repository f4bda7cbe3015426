"""Seeds of requests on a CPU, where vLLM cannot take back a draw by itself."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def take_back_draws() -> None:
    """From a prompt that was read in part vLLM samples too, and sets the request's generator back by its offset: a CUDA
    generator has one, of a CPU's it dies. Here the generator's whole state is kept and set back, so that a seed gives
    the same tokens however a prompt is read."""
    sample, keep_books = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync

    def sampled(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, unwanted = self.input_batch.generators, self.discard_request_mask.np
        self._turnwise_unwanted = {
            row: (generator, generator.get_state()) for row, generator in generators.items() if unwanted[row]
        }
        return sample(self, *args, **kwargs)

    def booked(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, unwanted = self.input_batch.generators, self._turnwise_unwanted
        for row in unwanted:
            # A generator that vLLM does not find it does not set back by an offset.
            del generators[row]
        try:
            return keep_books(self, *args, **kwargs)
        finally:
            for row, (generator, state) in unwanted.items():
                generator.set_state(state)
                generators[row] = generator

    GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync = sampled, booked
