"""A step of a plan: an action at a block, down to an exact number of patches."""

import torch
from torch import nn

from foveate.forward import Block, Place
from foveate.reduction.matching import Action
from foveate.reduction.regroup import NOTHING, Memory, regroup
from foveate.tokens import Tokens


class Reduce(nn.Module):
    """Leave exactly ``keep`` patches.

    Args:
        action: Chooses which patches stay and who speaks for the others.
        keep: Patches after the step.
        place: ``before`` the block or ``between`` its attention and its MLP.
        proportional: Whether attention weighs keys by size from here on.
        memory: What to store of a removed patch.

    Raises:
        ValueError: If ``keep`` is below 1.
    """

    def __init__(
        self,
        action: Action,
        keep: int,
        place: Place = "between",
        proportional: bool = False,
        memory: Memory = NOTHING,
    ) -> None:
        super().__init__()
        if keep < 1:
            raise ValueError(f"keep must be at least 1 patch; got {keep}.")
        self.action = action
        # Networks inside an action that is no module itself move and are saved as well.
        inside = () if isinstance(action, nn.Module) else vars(action).values()
        self.learned = nn.ModuleList(v for v in inside if isinstance(v, nn.Module))
        self.keep = keep
        self.place = place
        self.proportional = proportional
        self.memory = memory

    def forward(self, tokens: Tokens, block: Block) -> Tokens:
        """Reduce to ``keep`` patches; to as many as there are changes nothing.

        Args:
            tokens: Tokens with K patches.
            block: The block the step stands at.

        Returns:
            Tokens with ``keep`` patches.

        Raises:
            ValueError: If there are fewer than ``keep``.
        """
        if self.keep > tokens.num_patches:
            raise ValueError(
                f"keep at depth {block.depth} must be at most the {tokens.num_patches} "
                f"patches there are; got {self.keep}."
            )
        if self.keep == tokens.num_patches:
            return tokens
        # Autocast would round costs and cosines to eight bits, in which the close ones tie.
        with torch.autocast(tokens.x.device.type, enabled=False):
            grouping = self.action(tokens, block, self.keep)
        return regroup(tokens, grouping, self.memory).with_(proportional=self.proportional)
