"""A small byte-level GPT: the model that the example trains and the benchmark times.

Owns the network, its initial weights and sampling. Knows nothing of data, optimizers or
distribution; it imports torch alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

NUM_BYTES = 256
ROTATION_BASE = 10_000.0


@dataclass(frozen=True)
class GPTConfig:
    """Size of the network.

    Attributes:
        layers: Blocks of attention and feed-forward.
        width: Features per position; a multiple of twice `heads`.
        heads: Attention heads.
        context: Positions that the network can see.
        wide_products: Multiply matrices in fp32 whatever the dtype of the weights. For processors
            without bf16 or fp16 units, where a product in these dtypes takes about ten times as
            long; see `half_products_are_slow`.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    wide_products: bool = False

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width ({self.width}) must be a multiple of twice the heads ({self.heads})"
            )


class Linear(nn.Linear):
    """A linear layer without bias that can multiply in fp32 though its weights are narrower."""

    def __init__(self, inputs: int, outputs: int, wide: bool) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.wide = wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x [..., inputs]
        """Return the product, in the dtype of `x`, of shape [..., outputs]."""
        if not self.wide or x.dtype == torch.float32:
            return super().forward(x)
        return F.linear(x.float(), self.weight.float()).to(x.dtype)


def rotations(positions: int, features: int, device: torch.device) -> torch.Tensor:
    """Angles by which queries and keys turn with their position, so that attention sees distances.

    Returns:
        fp32, of shape [positions, features / 2]. Made anew in each forward: as a buffer it would be
        cast to the model's dtype.
    """
    speeds = ROTATION_BASE ** (-torch.arange(0, features, 2, device=device) / features)
    return torch.arange(positions, device=device).unsqueeze(1) * speeds


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:  # x [..., positions, features]
    """Turn each pair of features by its position's angle; in fp32, returned in the dtype of `x`."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.wide = config.wide_products
        self.qkv = Linear(config.width, 3 * config.width, config.wide_products)
        self.out = Linear(config.width, config.width, config.wide_products)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Return each position's mixture of itself and earlier ones, of the shape of `x`:
        [batch, positions, width].
        """
        batch, positions, width = x.shape
        qkv = self.qkv(x).view(batch, positions, 3, self.heads, width // self.heads)
        if self.wide:
            qkv = qkv.float()
        # Each is [batch, heads, positions, width / heads].
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            rotate(query, angles), rotate(key, angles), value, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, positions, width).to(x.dtype))


class FeedForward(nn.Module):
    """Two layers on each position by itself."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.widen = Linear(config.width, 4 * config.width, config.wide_products)
        self.narrow = Linear(4 * config.width, config.width, config.wide_products)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x [..., width]
        """Return what is added to `x`, of its shape."""
        # A squared ReLU learns as well as GELU at this size and costs a host processor a fraction
        # of it.
        return self.narrow(F.relu(self.widen(x)).square())


class Block(nn.Module):
    """Attention and feed-forward, each on a normalized copy that is added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_norm = nn.LayerNorm(config.width)
        self.feed = FeedForward(config)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Return the block's output, of the shape of `x`: [batch, positions, width]."""
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed(self.feed_norm(x))


def initialize(module: nn.Module) -> None:
    """First weights of one module; `model.apply(initialize)` reaches all."""
    if isinstance(module, Attention):
        # A block starts as the identity, so that depth costs nothing at the start of training. (Its
        # parts came before it.)
        nn.init.zeros_(module.out.weight)
    elif isinstance(module, FeedForward):
        nn.init.zeros_(module.narrow.weight)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.5)


class GPT(nn.Module):
    """Predicts the next byte from those before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(NUM_BYTES, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = Linear(config.width, NUM_BYTES, config.wide_products)
        self.apply(initialize)
        # All bytes equally likely at first: the loss starts at ln 256.
        nn.init.zeros_(self.head.weight)

    def logits(self, text: torch.Tensor) -> torch.Tensor:
        """Scores of the next byte at each position.

        Args:
            text: Bytes, int64, of shape [batch, positions], at most `context` positions.

        Returns:
            fp32 logits of shape [batch, positions, 256].
        """
        angles = rotations(text.shape[1], self.config.width // self.config.heads, text.device)
        x = self.bytes(text)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x)).float()

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Mean loss in nats per byte.

        Args:
            text: Bytes, int64, of shape [batch, positions + 1]: each position's target is the next
                one.
        """
        scores = self.logits(text[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())

    @torch.no_grad()
    def generate(
        self, prompt: bytes, length: int, temperature: float = 0.7, seed: int = 0
    ) -> bytes:
        """`prompt` with `length` sampled bytes behind it.

        Args:
            prompt: At least one byte.
            length: Bytes to add.
            temperature: Below 1 prefers likely bytes.
            seed: Of the samples; the global random state stays untouched.
        """
        device = self.bytes.weight.device
        # Drawn on the host: a sample is then the same on every device.
        generator = torch.Generator().manual_seed(seed)
        text = torch.tensor([list(prompt)], dtype=torch.long, device=device)
        for _ in range(length):
            scores = self.logits(text[:, -self.config.context :])[0, -1].cpu()
            chosen = torch.multinomial(
                torch.softmax(scores / temperature, dim=-1), 1, generator=generator
            )
            text = torch.cat([text, chosen.to(device).view(1, 1)], dim=1)
        return bytes(text[0].tolist())


def half_products_are_slow(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this device is a processor without units for products in `dtype`.

    Asked, not measured: products in another dtype have other low bits, so a measurement that other
    work disturbs would make one rank, or a resumed run, compute something else than the others. A
    release of torch that cannot tell counts as a processor without.
    """
    if dtype == torch.float32 or device.type != "cpu":
        return False
    units = {
        torch.bfloat16: ("avx512_bf16", "amx_bf16"),
        torch.float16: ("avx512_fp16", "amx_fp16"),
    }
    capabilities = getattr(torch.cpu, "get_capabilities", dict[str, object])()
    return not any(capabilities.get(unit) for unit in units[dtype])
