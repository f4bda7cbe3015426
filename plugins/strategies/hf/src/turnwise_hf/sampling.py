"""Drawing tokens from logits: one uniform number per request and position, log-probs of the full distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from turnwise.contracts.inference import GeneratingArgs
from turnwise.data.trajectory import float32, int32

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@frozen(eq=False)
class Rules:
    """How the rows of a batch are sampled, as arrays over rows: `temperature` (greedy rows hold 1), `greedy`, `top_p`,
    `top_k` (0: off), `seeds`."""

    temperature: np.ndarray
    greedy: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    seeds: np.ndarray

    @classmethod
    def of(cls, args: Sequence[GeneratingArgs], seeds: Sequence[int]) -> Rules:
        """The rules of one row per element of `args`."""
        greedy = np.array([item.temperature == 0 for item in args])
        return cls(
            temperature=float32([item.temperature or 1.0 for item in args]),
            greedy=greedy,
            # Greedy rows take the largest logit, which no cut takes out: they need not be sorted.
            top_p=np.where(greedy, 1.0, [item.top_p for item in args]),
            top_k=np.where(greedy, 0, [item.top_k for item in args]),
            seeds=np.array([seed % 2**64 for seed in seeds], np.uint64),
        )

    def rows(self, index: np.ndarray) -> Rules:
        """The rules of some rows."""
        return Rules(
            self.temperature[index], self.greedy[index], self.top_p[index], self.top_k[index], self.seeds[index]
        )


def uniform(seeds: np.ndarray, position: int) -> np.ndarray:
    """float64 [n] in [0, 1): the number that belongs to each seed (uint64 [n]) and position, whatever else is in the
    batch.

    SplitMix64 (Steele, Lea, Flood 2014) from a mixed seed, so that neighbouring seeds are far apart; the upper 52 bits.
    """
    # The generator's arithmetic is modulo 2⁶⁴: overflow is meant.
    with np.errstate(over="ignore"):
        # SplitMix64 jumps to any position at once: no state is kept, so a row draws the same alone and in a batch.
        state = _mixed(seeds + _GOLDEN) + np.uint64(position + 1) * _GOLDEN
        return (_mixed(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mixed(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * _MIX[0]
    state = (state ^ (state >> np.uint64(27))) * _MIX[1]
    return state ^ (state >> np.uint64(31))


def draw(logits: Tensor, rules: Rules, position: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 [n] and their log-probs float32 [n] for logits [n, vocabulary], at generated position `position`.

    A log-prob is of log_softmax(logits / temperature) over the full vocabulary, before top-k and top-p; greedy:
    temperature 1. Non-finite logits give a non-finite log-prob, which the caller must refuse.
    """
    device = logits.device
    # The trainer's log-probs are of float32 logits, too.
    logits = logits.float()
    if not (rules.temperature == 1).all():
        logits = logits / torch.from_numpy(rules.temperature).to(device)[:, None]
    # Before top-k and top-p are applied: the trainer computes its own over the full vocabulary.
    logprobs = torch.log_softmax(logits, dim=-1)
    if rules.greedy.all():
        tokens = logprobs.argmax(dim=-1)
    else:
        tokens = _inverse_cdf(logprobs, rules, position)
        if rules.greedy.any():
            tokens = torch.where(torch.from_numpy(rules.greedy).to(device), logprobs.argmax(dim=-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return int32(tokens.cpu().numpy()), float32(chosen.cpu().numpy())


def _inverse_cdf(logprobs: Tensor, rules: Rules, position: int) -> Tensor:
    """The first token whose cumulated mass exceeds u × the whole mass. In float64: in float32 a large vocabulary's tail
    is rounded away."""
    mass = truncated(logprobs.exp().double(), rules)
    # Not normalised: u is scaled by the whole mass instead.
    cumulated = mass.cumsum(dim=-1)
    number = torch.from_numpy(uniform(rules.seeds, position)).to(logprobs.device)
    tokens = torch.searchsorted(cumulated, (number[:, None] * cumulated[:, -1:]), right=True)[:, 0]
    return tokens.clamp_(max=mass.shape[-1] - 1)  # only where the mass is not a number


def truncated(mass: Tensor, rules: Rules) -> Tensor:
    """`mass` [n, vocabulary] with zeros for what top-k, and then top-p of what top-k left, take out. Equal masses: the
    smaller id stays."""
    rows = np.flatnonzero((rules.top_p < 1) | ((rules.top_k > 0) & (rules.top_k < mass.shape[-1])))
    if not len(rows):
        return mass
    device, index = mass.device, torch.from_numpy(rows).to(mass.device)
    # Stable, so that of equal masses the smaller id stays on every device.
    ordered, order = mass[index].sort(dim=-1, descending=True, stable=True)
    top_k = torch.from_numpy(np.where(rules.top_k[rows] > 0, rules.top_k[rows], mass.shape[-1])).to(device)[:, None]
    ordered = ordered * (torch.arange(mass.shape[-1], device=device) < top_k)
    before = ordered.cumsum(dim=-1) - ordered
    top_p = torch.from_numpy(rules.top_p[rows]).to(device)[:, None]
    # Strictly below: the token that crosses top_p stays, so at least one does.
    keep = before < top_p * ordered.sum(dim=-1, keepdim=True)
    keep[:, 0] = True
    kept = torch.zeros_like(ordered).scatter_(1, order, ordered * keep)
    result = mass.clone()
    result[index] = kept
    return result
