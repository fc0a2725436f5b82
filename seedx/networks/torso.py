"""Torsos: from an observation tree to one feature vector a row."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PyTree, Shaped

from seedx.checks import ConfigError
from seedx.config import NetworkConfig
from seedx.imports import load
from seedx.types import ArraySpec

_CONV_FEATURES = 256
_ORTHOGONAL = nnx.initializers.orthogonal(math.sqrt(2))


def build_torso(config: NetworkConfig, spec: PyTree, rngs: nnx.Rngs) -> tuple[nnx.Module, int]:
    """The torso that `config.torso` names, `torso(observation [B, ...]) -> [B, D]`, and D.

    A user's own is "module:function": function(spec, rngs) returns an `nnx.Module` with `num_features` = D.

    Args:
        config: Of the network.
        spec: Tree of `ArraySpec` that the torso will see, frames already stacked.
        rngs: Source of the initial weights.

    Raises:
        ConfigError: `config.torso` is no name of a torso, or the user's own breaks the contract.
    """
    if config.torso in ("auto", "mlp", "shallow", "deep"):
        torso = Torso(config, spec, rngs)
        return torso, torso.num_features
    if ":" not in config.torso:
        raise ConfigError(
            f"network.torso ({config.torso!r}) must be 'auto', 'mlp', 'shallow', 'deep' or 'module:function'."
        )
    torso = load(config.torso, "network.torso")(spec, rngs)
    num_features = getattr(torso, "num_features", None)
    if not (isinstance(torso, nnx.Module) and isinstance(num_features, int)):
        raise ConfigError(
            f"network.torso {config.torso!r} returned {type(torso).__name__}; it must return a flax.nnx.Module with an "
            "int attribute `num_features` and __call__(observation [B, ...]) -> [B, num_features]."
        )
    return torso, num_features


def is_image(spec: ArraySpec) -> bool:
    """Whether a leaf is an image, `[H, W]` or `[H, W, C]`."""
    return spec.num_values is None and len(spec.shape) in (2, 3)


class Torso(nnx.Module):
    """Each image through a convolutional net of its own, all other leaves (flattened, concatenated) through one MLP.

    The "mlp" torso takes images as vectors. Discrete leaves are one-hot; uint8 leaves are divided by the spec's
    maximum (255 where it has none).
    """

    def __init__(self, config: NetworkConfig, spec: PyTree, rngs: nnx.Rngs) -> None:
        self.specs = tuple(jax.tree.leaves(spec))
        self.images = tuple(config.torso != "mlp" and is_image(leaf) for leaf in self.specs)
        net = Deep if config.torso == "deep" else Shallow
        shapes = [leaf.shape for leaf, image in zip(self.specs, self.images, strict=True) if image]
        sizes = [vector_size(leaf) for leaf, image in zip(self.specs, self.images, strict=True) if not image]
        self.convs = nnx.Dict({f"image_{i}": net((*shape, 1)[:3], rngs) for i, shape in enumerate(shapes)})
        self.mlp = MLP(sum(sizes), config.hidden, config.activation, rngs) if sizes else None
        self.num_features = _CONV_FEATURES * len(shapes) + (self.mlp.num_features if self.mlp else 0)

    def __call__(self, observation: PyTree) -> Float[Array, "B D"]:
        """Features of `[B, ...]` leaves."""
        images, vectors = [], []
        for spec, image, x in zip(self.specs, self.images, jax.tree.leaves(observation), strict=True):
            (images if image else vectors).append(as_float(spec, x))
        features = [net(x if x.ndim == 4 else x[..., None]) for net, x in zip(self.convs.values(), images, strict=True)]
        if self.mlp is not None:
            features.append(self.mlp(_concatenate([x.reshape(x.shape[0], -1) for x in vectors])))
        return _concatenate(features)


class MLP(nnx.Module):
    """Dense layers, each followed by the activation ("tanh" or "relu")."""

    def __init__(self, num_inputs: int, hidden: tuple[int, ...], activation: str, rngs: nnx.Rngs) -> None:
        widths = (num_inputs, *hidden)
        self.activation = {"tanh": jnp.tanh, "relu": jax.nn.relu}[activation]
        self.num_features = widths[-1]
        self.layers = nnx.Dict(
            {
                f"layer_{i}": nnx.Linear(fan_in, fan_out, kernel_init=_ORTHOGONAL, rngs=rngs)
                for i, (fan_in, fan_out) in enumerate(itertools.pairwise(widths))
            }
        )

    def __call__(self, x: Float[Array, "B I"]) -> Float[Array, "B D"]:
        """Features of a vector."""
        for layer in self.layers.values():
            x = self.activation(layer(x))
        return x


class Shallow(nnx.Module):
    """IMPALA's shallow net (1802.01561, figure 3 left): two convolutions, one dense layer.

    Padding is SAME, so that images smaller than the filters (Catch: 10 x 5) work too.
    """

    def __init__(self, shape: tuple[int, ...], rngs: nnx.Rngs) -> None:
        height, width, channels = shape
        conv = {"padding": "SAME", "kernel_init": _ORTHOGONAL, "rngs": rngs}
        self.conv_0 = nnx.Conv(channels, 16, (8, 8), 4, **conv)
        self.conv_1 = nnx.Conv(16, 32, (4, 4), 2, **conv)
        num_inputs = -(-height // 8) * -(-width // 8) * 32
        self.dense = nnx.Linear(num_inputs, _CONV_FEATURES, kernel_init=_ORTHOGONAL, rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B D"]:
        """Features of an image."""
        x = jax.nn.relu(self.conv_0(x))
        x = jax.nn.relu(self.conv_1(x))
        return jax.nn.relu(self.dense(x.reshape(x.shape[0], -1)))


class Deep(nnx.Module):
    """IMPALA's deep net (1802.01561, figure 3 right): sections of 16, 32 and 32 channels, one dense layer."""

    def __init__(self, shape: tuple[int, ...], rngs: nnx.Rngs) -> None:
        height, width, channels = shape
        self.section_0 = Section(channels, 16, rngs)
        self.section_1 = Section(16, 32, rngs)
        self.section_2 = Section(32, 32, rngs)
        num_inputs = -(-height // 8) * -(-width // 8) * 32
        self.dense = nnx.Linear(num_inputs, _CONV_FEATURES, rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B D"]:
        """Features of an image."""
        x = jax.nn.relu(self.section_2(self.section_1(self.section_0(x))))
        return jax.nn.relu(self.dense(x.reshape(x.shape[0], -1)))


class Section(nnx.Module):
    """A convolution, max-pooling that halves the image, and two residual blocks."""

    def __init__(self, num_inputs: int, channels: int, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(num_inputs, channels, (3, 3), rngs=rngs)
        self.block_0 = Residual(channels, rngs)
        self.block_1 = Residual(channels, rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B H2 W2 D"]:
        """Half the height and width."""
        x = nnx.max_pool(self.conv(x), (3, 3), (2, 2), "SAME")
        return self.block_1(self.block_0(x))


class Residual(nnx.Module):
    """Two convolutions, each after a ReLU, beside the identity."""

    def __init__(self, channels: int, rngs: nnx.Rngs) -> None:
        self.conv_0 = nnx.Conv(channels, channels, (3, 3), rngs=rngs)
        self.conv_1 = nnx.Conv(channels, channels, (3, 3), rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
        """Same shape."""
        return x + self.conv_1(jax.nn.relu(self.conv_0(jax.nn.relu(x))))


def vector_size(spec: ArraySpec) -> int:
    """Features of a leaf taken as a vector."""
    return math.prod(spec.shape) * (spec.num_values or 1)


def as_float(spec: ArraySpec, x: Shaped[Array, "B ..."]) -> Float[Array, "B ..."]:
    """A leaf as a net sees it: one-hot (a last axis more) if discrete, scaled if uint8, else as it is; float32."""
    if spec.num_values is not None:
        return jax.nn.one_hot(x, spec.num_values, dtype=jnp.float32)
    if spec.dtype == "uint8":
        return x.astype(jnp.float32) / (255.0 if spec.maximum is None else float(np.max(spec.maximum)))
    return x.astype(jnp.float32)


def _concatenate(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
