"""
Head and loss in training. It replaces ops.linear_cross_entropy, and holds the logits of one tile of tokens at a time.

    python -m tools.compare_ops --only=cross_entropy            time it beside libraries
    python -m pytest tests/kernels/test_kernels.py -k cross_entropy
"""
import torch
import torch.nn.functional as F

import ops

MAX_LOGITS = 2 ** 28                    # the most that exist at a time


def cross_entropy_tile(logits, target, weight, n_classes):
    """Returns the cross-entropy (m,) of logits (m, vocab), whose columns from n_classes on do not count, and the
    gradient of weight * cross-entropy with respect to the logits (m, vocab), which is 0 in those columns. target,
    weight (m,). The statistics are fp32 or better; the gradient has the dtype of the logits."""
    column = torch.arange(logits.size(1), device=logits.device)                # (vocab,)
    x = logits.to(ops.at_least_fp32(logits.dtype)).masked_fill(column >= n_classes, float("-inf"))
    lse = x.logsumexp(-1)                                                      # (m,)
    ce = lse - x.gather(1, target[:, None])[:, 0]                              # (m,)
    one_hot = (column == target[:, None]).to(x.dtype)                          # (m, vocab)
    return ce, ((torch.exp(x - lse[:, None]) - one_hot) * weight[:, None]).to(logits.dtype)


tile_loss = torch.compile(cross_entropy_tile)


class LinearCrossEntropy(torch.autograd.Function):
    """The forward computes the loss and, because the loss is a scalar, its gradients too: three products for each tile.
    So only one tile's logits exist at a time. The backward only scales the gradients."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, hidden, head, target, weight):
        vocab, ctx.head_dtype, dtype = len(head), head.dtype, ops.at_least_fp32(hidden.dtype)
        # Rows of zeros: if vocab is not a multiple of 8, the GPU would run slow, unaligned kernels.
        head = F.pad(head.to(hidden.dtype), (0, 0, 0, -vocab % 64))             # (vocab + padding, d)
        loss, wanted = hidden.new_zeros((), dtype=dtype), any(ctx.needs_input_grad[:2])
        d_hidden = torch.zeros_like(hidden) if wanted else None
        d_head = torch.zeros_like(head, dtype=dtype) if wanted else None

        tile = max(1, MAX_LOGITS // vocab)
        for i in range(0, hidden.size(0), tile):
            part, y, w = hidden[i:i + tile], target[i:i + tile], weight[i:i + tile]
            ce, d_logits = tile_loss(part @ head.T, y, w, vocab - 1)
            loss += (w * ce).sum()
            if wanted:
                d_hidden[i:i + tile] = d_logits @ head
                d_head += d_logits.T @ part

        ctx.save_for_backward(d_hidden, d_head[:vocab] if wanted else None)
        return loss

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        d_hidden, d_head = ctx.saved_tensors
        return (grad * d_hidden).to(d_hidden.dtype), (grad * d_head).to(ctx.head_dtype), None, None


def linear_cross_entropy(hidden, head, target, weight):
    """As ops.linear_cross_entropy. Differentiable in hidden and head."""
    return LinearCrossEntropy.apply(hidden, head, target, weight)
