"""How a model is trained: the settings of `distill` and `train-adapter`."""

from dataclasses import dataclass

from ridgeline.core.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecipe:
    """Settings of a training run.

    Attributes:
        steps: of the optimizer; the rate rises over the first twentieth and then falls linearly.
        step_tokens: tokens of a step.
        micro_batch_tokens: tokens whose logits are in memory at once; gradients add up to a step.
        window_tokens: length of a sequence.
        learning_rate: of Adam, at its height.
        kl_share: of the loss that is KL to the teacher; the rest is the next token's cross-entropy.
        top_k: compare the teacher's likeliest tokens, and all others as one; 0 compares all.
        keep_zeros: weights of the layers that are zero stay so, as after `ridgeline prune`.
        ternary: matrices of the layers become −1, 0 and 1 times one scale each (BitNet b1.58).
        seed: of the order of the text.
        checkpoint_every: steps, after which an interrupted run loses nothing.

    Raises:
        SettingsError: a setting is out of bounds.
    """

    steps: int = 200
    step_tokens: int = 4096
    micro_batch_tokens: int = 2048
    window_tokens: int = 256
    learning_rate: float = 5e-4
    kl_share: float = 1.0
    top_k: int = 0
    keep_zeros: bool = False
    ternary: bool = False
    seed: int = 0
    checkpoint_every: int = 25

    def __post_init__(self) -> None:
        if self.ternary and self.keep_zeros:
            raise SettingsError(
                "keep_zeros has no effect with ternary, which has zeros of its own."
            )
        for name, value, least, most in (
            ("steps", self.steps, 1, 1 << 31),
            ("step_tokens", self.step_tokens, 2, 1 << 31),
            ("micro_batch_tokens", self.micro_batch_tokens, 2, 1 << 31),
            ("window_tokens", self.window_tokens, 2, 1 << 20),
            ("learning_rate", self.learning_rate, 0.0, 1.0),
            ("kl_share", self.kl_share, 0.0, 1.0),
            ("top_k", self.top_k, 0, 1 << 20),
            ("seed", self.seed, 0, (1 << 63) - 1),
            ("checkpoint_every", self.checkpoint_every, 1, 1 << 31),
        ):
            if not least <= value <= most:
                raise SettingsError(f"{name} is {value}; it must be from {least} to {most}.")
        if self.micro_batch_tokens % self.window_tokens or self.step_tokens % (
            self.micro_batch_tokens
        ):
            raise SettingsError(
                f"step_tokens ({self.step_tokens:,}) must be a multiple of micro_batch_tokens "
                f"({self.micro_batch_tokens:,}), and that one of window_tokens "
                f"({self.window_tokens:,})."
            )

    def check_shares(self, num_ranks: int) -> None:
        """
        Raises:
            SettingsError: so many ranks do not share a step's micro-batches equally.
        """
        batches = self.step_tokens // self.micro_batch_tokens
        if batches % num_ranks:
            raise SettingsError(
                f"{num_ranks} ranks do not share the {batches} micro-batches of a step equally: "
                f"step_tokens ({self.step_tokens:,}) must be a multiple of {num_ranks} times "
                f"micro_batch_tokens ({self.micro_batch_tokens:,})."
            )
