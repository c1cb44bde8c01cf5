"""Final RMSNorm, output head and score processing; each program also leaves the best of its own tiles.

logits = W (x * norm_weight) / rms(x), in fp32. scores = logits, then + logit_bias, then the repetition penalty on
every id seen in prompt or output (a negative score is multiplied, another divided: Keskar et al. 2019), then -
frequency_penalty * output_count - presence_penalty * (output_count > 0).
"""

from __future__ import annotations

import torch

LOGIT_BIAS = 1  # bits of `processors`
PENALTIES = 2
NO_ID = 2**31 - 1  # the id of a program without a tile


def head_torch(
    x: torch.Tensor,  # fp32 [hidden_size]
    norm_weight: torch.Tensor,  # D [hidden_size]
    weight: torch.Tensor,  # D [vocab_size, hidden_size]
    processors: torch.Tensor,  # int32 [1], bits
    repetition_penalty: torch.Tensor,  # fp32 [1]
    presence_penalty: torch.Tensor,  # fp32 [1]
    frequency_penalty: torch.Tensor,  # fp32 [1]
    logit_bias: torch.Tensor,  # fp32 [vocab_size]
    context_counts: torch.Tensor,  # int32 [vocab_size]: how often each id stands in prompt and output
    output_counts: torch.Tensor,  # int32 [vocab_size]: how often it was sampled
    gate: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    logits: torch.Tensor,  # fp32 [vocab_size]
    scores: torch.Tensor,  # fp32 [vocab_size]
    best_score: torch.Tensor,  # fp32 [num_programs]
    best_id: torch.Tensor,  # int32 [num_programs]
    *,
    eps: float,
) -> None:
    """Writes raw logits, processed scores and the best (score, lowest id); NaN as best where a logit is not finite.

    The reference is one program: the best of all is in entry 0, the other entries say that they had no tile.
    """
    if int(halted) or not int(gate):
        return
    normed = x * torch.rsqrt(x.square().mean() + eps) * norm_weight.float()
    torch.mv(weight.float(), normed, out=logits)  # .float() of an fp32 weight is the weight itself
    scores.copy_(logits)
    if int(processors) & LOGIT_BIAS:
        scores += logit_bias
    if int(processors) & PENALTIES:
        penalised = torch.where(scores < 0, scores * repetition_penalty, scores / repetition_penalty)
        scores.copy_(torch.where(context_counts > 0, penalised, scores))
        scores -= frequency_penalty * output_counts + presence_penalty * (output_counts > 0)
    best_score.fill_(float("-inf"))
    best_id.fill_(NO_ID)
    best = torch.argmax(scores)
    best_score[0] = scores[best]
    best_id[0] = (scores == scores[best]).nonzero()[0, 0] if scores[best] == scores[best] else best
    if not bool(torch.isfinite(logits).all()):
        best_score[0] = float("nan")
