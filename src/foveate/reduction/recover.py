"""From fewer patches to the full grid, through their stand-ins."""

import torch
from torch import nn

from foveate.forward import Block, Place
from foveate.reduction.regroup import speak
from foveate.tokens import Tokens


def recover(tokens: Tokens) -> Tokens:
    r"""Fill the grid of the full model again, in its original order.

    :math:`\hat x_n = \sum_s w_{ns} x_{\mathrm{stand\_in}(n, s)} + \mathrm{offset}_n` for
    every original patch n, as the steps that removed it have stored it.

    Args:
        tokens: Tokens with K patches.

    Returns:
        Tokens with all N patches, as if nothing had been removed.
    """
    if tokens.stand_in is None:
        return tokens
    patches = speak(tokens.patches, tokens.stand_in, tokens.weight)  # (B, N, C)
    if tokens.offset is not None:
        patches = patches + tokens.offset
    x = torch.cat([tokens.prefix, patches.to(tokens.x.dtype)], dim=1)
    return Tokens(x, tokens.layout, position=tokens.grid_position)


class Restore(nn.Module):
    """The step that fills the grid before a block: the last blocks then see all of it."""

    place: Place = "before"

    def forward(self, tokens: Tokens, block: Block) -> Tokens:
        """Tokens on the full grid."""
        return recover(tokens)
