"""The loss that keeps a routed layer's experts evenly used, where it can be computed: in the layer.

Of each sequence by itself (DeepSeek-V3, arXiv 2412.19437, equation 17), so that it depends neither on how a microbatch
is computed in pieces nor on which layers a stage has:

    coefficient * tokens / layers * experts * sum over experts of (share of the tokens it got) * (its mean probability)

summed over a model's layers and sequences, and divided by a step's tokens like every other loss. One layer's sum is
transformers' `load_balancing_loss_func` (Switch Transformer, arXiv 2101.03961, equations 4 to 6).
Shapes: B samples, L tokens, D hidden values, E experts, K experts of a token.
"""

from functools import partial
from typing import Any

import torch
from torch import nn


def balance_experts(layers: nn.ModuleList, config: Any) -> None:
    """From now on the gradient of what comes out of the layers' routed blocks brings along that of their balance."""
    weight = config.router_aux_loss_coef / config.num_hidden_layers
    for module in layers.modules():
        if hasattr(module, "experts") and hasattr(module, "gate"):
            module.register_forward_hook(partial(_balanced, top_k=config.num_experts_per_tok, weight=weight))


def imbalance(router_logits_BLE: torch.Tensor, *, top_k: int) -> torch.Tensor:
    """(B,): `top_k` where a sequence uses all experts alike, up to the number of experts."""
    probabilities_BLE = torch.softmax(router_logits_BLE.float(), dim=-1)
    chosen_BLK = probabilities_BLE.topk(top_k, dim=-1).indices
    shares_BE = torch.zeros_like(probabilities_BLE).scatter_(-1, chosen_BLK, 1.0).mean(dim=1)
    return router_logits_BLE.shape[-1] * (shares_BE * probabilities_BLE.mean(dim=1)).sum(dim=-1)


def _balanced(block: Any, given: tuple[Any, ...], y_BLD: torch.Tensor, *, top_k: int, weight: float) -> Any:
    """(A forward hook.) y, whose gradient brings along the balance's."""
    if not torch.is_grad_enabled():
        return None
    hidden_BLD: torch.Tensor = given[0]
    router_logits_BLE = block.gate(hidden_BLD)[0].view(*hidden_BLD.shape[:2], -1)
    loss = weight * hidden_BLD.shape[1] * imbalance(router_logits_BLE, top_k=top_k).sum()
    return _WithLoss.apply(y_BLD, loss)  # type: ignore[no-untyped-call]


class _WithLoss(torch.autograd.Function):
    """y as it is; the loss's gradient is 1, whatever y's."""

    @staticmethod
    def forward(ctx: Any, y_BLD: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.loss_shape = loss.shape
        return y_BLD.view_as(y_BLD)

    @staticmethod
    def backward(ctx: Any, grad_y_BLD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad_y_BLD, torch.ones(ctx.loss_shape, device=grad_y_BLD.device)
