"""What an op, a pass or a step moves and computes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOPs of matrix products (2 for each multiply-add), and bytes by what they are.

    ``state_bytes`` are those of sequences' states, read and written.

    Norms, rotations, softmax and activations are counted by their bytes alone. ``link_bytes`` are
    those that one rank sends to others, in ``link_messages`` collective calls.
    """

    flops: float = 0.0
    weight_bytes: float = 0.0
    kv_read_bytes: float = 0.0
    kv_write_bytes: float = 0.0
    state_bytes: float = 0.0
    activation_bytes: float = 0.0
    link_bytes: float = 0.0
    link_messages: float = 0.0

    @property
    def num_bytes(self) -> float:
        """Bytes to and from the rank's own memory."""
        kv = self.kv_read_bytes + self.kv_write_bytes
        return self.weight_bytes + kv + self.state_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            flops=self.flops + other.flops,
            weight_bytes=self.weight_bytes + other.weight_bytes,
            kv_read_bytes=self.kv_read_bytes + other.kv_read_bytes,
            kv_write_bytes=self.kv_write_bytes + other.kv_write_bytes,
            state_bytes=self.state_bytes + other.state_bytes,
            activation_bytes=self.activation_bytes + other.activation_bytes,
            link_bytes=self.link_bytes + other.link_bytes,
            link_messages=self.link_messages + other.link_messages,
        )

    def __mul__(self, times: float) -> "Work":
        return Work(
            flops=self.flops * times,
            weight_bytes=self.weight_bytes * times,
            kv_read_bytes=self.kv_read_bytes * times,
            kv_write_bytes=self.kv_write_bytes * times,
            state_bytes=self.state_bytes * times,
            activation_bytes=self.activation_bytes * times,
            link_bytes=self.link_bytes * times,
            link_messages=self.link_messages * times,
        )


NOTHING = Work()


def total(parts: "list[Work]") -> Work:
    """The sum."""
    result = NOTHING
    for part in parts:
        result = result + part
    return result
