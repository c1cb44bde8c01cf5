"""The rule by which a step is right: its logits are as near to an fp32 reference as the precision of the weights lets.

The measure of an error is that of a plain PyTorch step in the same precision (bench/plain.py): at most twice as large,
in the Euclidean norm and in the worst element.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Of the logits, relative to the reference's, in the Euclidean norm: the order of sums of thousands of terms. Two right
# ways of computing in fp32 differ by this, so no bound is below it.
SUM_ORDER = 2e-5
ALLOWED = 2.0  # times the error of the same precision in plain PyTorch
# For systems of others, who are to be known by their logits as the same model and the same step; how precise they are
# is their affair. (transformers in fp32 has been seen with 2.1 times the error of the plain step.)
ALLOWED_OTHERS = 10.0
CAP = 0.1  # whatever the plain step makes of it, a larger error is none of precision


@dataclass(frozen=True)
class Bounds:
    """How far logits may be from the reference.

    Attributes:
        error: In the Euclidean norm, relative to the reference.
        worst: One logit.
        plain_error: As ``error``, what plain PyTorch has in the precision of the weights.
    """

    error: float
    worst: float
    plain_error: float

    @classmethod
    def of(cls, want: torch.Tensor, plain: torch.Tensor, allowed: float = ALLOWED) -> Bounds:
        """From the logits of the reference and of the plain step, both [vocab_size] in fp32.

        Args:
            want: Of the reference.
            plain: Of the plain step.
            allowed: How many times the errors of the plain step the bounds are.
        """
        plain_error = relative_error(plain, want)
        return cls(
            error=min(max(allowed * plain_error, SUM_ORDER), CAP),
            worst=max(allowed * float((plain - want).abs().max()), SUM_ORDER * float(want.abs().max())),
            plain_error=plain_error,
        )

    def faults(self, got: torch.Tensor, want: torch.Tensor) -> list[str]:
        """What is wrong with logits, in words; nothing, if they are right. Both are [vocab_size] in fp32."""
        found = []
        error, worst = relative_error(got, want), float((got - want).abs().max())
        if not error <= self.error:
            found.append(f"error {error:.1e} above {self.error:.1e}")
        if not worst <= self.worst:
            found.append(f"a logit is {worst:.1e} off, above {self.worst:.1e}")
        chosen, best = int(got.argmax()), int(want.argmax())
        if float(want[best] - want[chosen]) > 2 * self.worst:  # both may be off, each by this much
            found.append(f"token {chosen}, the reference has {best}")
        return found


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Distance of ``got`` from ``want`` in the Euclidean norm, over the norm of ``want``."""
    return float((got - want).norm() / want.norm())


def token_fault(token: int, want: torch.Tensor) -> str | None:
    """What is wrong with a chosen token where its logits are not known.

    Args:
        token: The choice of a system.
        want: fp32 [vocab_size], the reference.

    Returns:
        None, if the reference gives it as much as its best, up to what an error of CAP can make of two logits.
    """
    best = int(want.argmax())
    slack = 2 * CAP * float(want.square().mean().sqrt())
    return None if float(want[best] - want[token]) <= slack else f"token {token}, the reference has {best}"
