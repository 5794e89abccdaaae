"""One frozen backbone for several tasks: what each adds to it is of low rank."""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from foveate.backbones.recomputed import innermost
from foveate.models import Model

__all__ = [
    "add_lora",
    "load_lora",
    "lora_parameters",
    "lora_state",
    "share",
    "shared_copy",
    "use_lora",
    "without_lora",
]

M = TypeVar("M", bound=nn.Module)


def shared_copy(module: M) -> M:
    """Copy the structure of a module, but no weight.

    Args:
        module: Any module.

    Returns:
        Modules of their own around the very same parameters and buffers, so that modules
        can be exchanged in the copy and the original stays as it is.
    """
    weights = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(weight): weight for weight in weights})


def share(model: Model) -> Model:
    """Model whose backbone can take low-rank updates; all weights are shared.

    Args:
        model: The model; it is not edited.

    Returns:
        Another model with the same output.
    """
    backbone: Any = shared_copy(model.backbone)  # type: ignore[type-var]  # a module
    tasks: dict[str, Any] = dict(model.tasks.items())
    return Model(model.name, backbone, tasks, model.transform).train(model.training)


def add_lora(model: Model, name: str, rank: int = 16, scale: float = 1.0) -> int:
    r"""Add a low-rank update to queries, keys, values and output of every block.

    Every such layer becomes :math:`W + \mathrm{scale} \cdot B A` with A ``(rank, in)``
    random and B ``(out, rank)`` zero, so that the output does not change at first. The
    update is trained, nothing else is. A fused layer for queries, keys and values has one.

    Args:
        model: Of :func:`share`.
        name: Of the update; one model can hold several, of which one is active.
        rank: Its rank.
        scale: Factor of the update.

    Returns:
        Numbers added.

    Raises:
        ValueError: If the rank is below 1, the name is taken or cannot be part of a path,
            or the backbone's adapter does not name its linear layers.
        ModuleNotFoundError: If peft is not installed.

    References:
        Hu et al., "LoRA: low-rank adaptation of large language models", ICLR 2022.
    """
    peft, backbone = _peft(), _inner(model)
    if rank < 1:
        raise ValueError(f"rank must be at least 1; got {rank}.")
    if not name or "." in name:
        raise ValueError(f"name must have a letter and no dot; got '{name}'.")
    if any(name in layer.lora_A for layer in _layers(backbone)):
        raise ValueError(f"name must be new; there is a low-rank update '{name}' already.")
    if not hasattr(backbone, "attention_layers"):
        raise ValueError(
            "model must have a backbone whose linear layers are known, of timm or "
            f"transformers; got {type(backbone).__name__}."
        )
    targets = [
        path
        for depth in range(backbone.num_blocks)
        for path in backbone.attention_layers(depth)
    ]
    config = peft.LoraConfig(
        r=rank, lora_alpha=scale * rank, lora_dropout=0.0, target_modules=targets
    )
    grown = [p for p in model.parameters() if p.requires_grad]
    peft.inject_adapter_in_model(config, backbone.network, adapter_name=name)
    del backbone.network.peft_config  # peft warns of it when the next update is added
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in grown:
        parameter.requires_grad_(True)
    for layer in _layers(backbone):  # the newest is active already, but is not trained
        layer.set_adapter(name)
    return sum(p.numel() for p in lora_parameters(model, name))


def use_lora(model: Model, name: str) -> None:
    """Make one low-rank update the active and trainable one; copies no weight.

    Args:
        model: The model.
        name: Of the update.

    Raises:
        ValueError: If there is none of that name.
    """
    layers = _layers(_inner(model))
    if layers and all(layer.active_adapters == [name] for layer in layers):
        return
    if not any(name in layer.lora_A for layer in layers):
        raise ValueError(f"name must be of a low-rank update of the model; got '{name}'.")
    for layer in layers:
        layer.set_adapter(name)


def lora_parameters(model: Model, name: str) -> list[nn.Parameter]:
    """Parameters of one low-rank update."""
    return [
        part[name].weight
        for layer in _layers(_inner(model))
        for part in (layer.lora_A, layer.lora_B)
        if name in part
    ]


def lora_state(model: Model, name: str) -> dict[str, Tensor]:
    """Weights of one low-rank update, by path in the network."""
    ending = (f".lora_A.{name}.weight", f".lora_B.{name}.weight")
    found = {}
    for key, value in _inner(model).network.state_dict().items():
        if key.endswith(ending):
            found[key.removesuffix(f".{name}.weight")] = value
    return found


def without_lora(module: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers as they were before any low-rank update was added."""
    return {
        name.replace(".base_layer.", "."): value
        for name, value in module.state_dict().items()
        if ".lora_" not in name
    }


def load_lora(model: Model, name: str, state: Mapping[str, Tensor]) -> None:
    """Set the weights of one low-rank update.

    Args:
        model: The model, to which the update has been added.
        name: Of the update.
        state: Of :func:`lora_state`.

    Raises:
        ValueError: If they do not fit.
    """
    mine = lora_state(model, name)
    shapes = [{k: v.shape for k, v in each.items()} for each in (mine, dict(state))]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"state must have the {len(mine)} matrices of the update '{name}' in their "
            f"shapes; got {len(state)} that differ."
        )
    for key, value in state.items():
        mine[key].copy_(value)


def _layers(backbone: nn.Module) -> list[Any]:
    """Layers that have been given a low-rank update."""
    return [m for m in backbone.modules() if hasattr(m, "lora_A") and hasattr(m, "lora_B")]


def _inner(model: Model) -> Any:  # noqa: ANN401 - an adapter with its network
    return innermost(model.backbone)


def _peft() -> Any:  # noqa: ANN401 - a module without types
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "low-rank updates need peft: pip install 'foveate[train]'."
        ) from error
    return peft
